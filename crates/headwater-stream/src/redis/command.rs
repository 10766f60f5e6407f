//! Encodes commands as RESP, in the task of the caller.
//!
//! Upstream: every call of this backend. Downstream: `multiplexed` and `connection`, which send the bytes.

use std::ops::Range;

use super::keys::Key;
use super::reply::Scanner;
use super::scripts::Script;
use crate::entry::{Digits, EntryId, FieldRef, Fields, put_count, put_text};

/// Commands of one slot that are sent together, in order.
#[derive(Debug, Default)]
pub(super) struct Commands {
    bytes: Vec<u8>,
    /// Number of complete commands.
    count: usize,
    /// The scripts, by index of their command.
    scripts: Vec<(usize, &'static Script)>,
    /// The transactions, each from its `MULTI` to its `EXEC`.
    transactions: Vec<Range<usize>>,
    /// Number of missing arguments of the last command.
    missing: usize,
}

/// Complete commands, ready to be sent and re-sent.
#[derive(Debug)]
pub(super) struct EncodedCommands {
    pub(super) bytes: Vec<u8>,
    count: usize,
    scripts: Vec<(usize, &'static Script)>,
    transactions: Vec<Range<usize>>,
}

impl Commands {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ..Self::default() }
    }

    /// One command with all its words.
    pub(super) fn one<W: AsRef<[u8]>>(words: &[W]) -> Self {
        let mut commands = Self::new();
        commands.add(words);
        commands
    }

    /// One command on a key: its name, the key, and the words after it.
    pub(super) fn on_key<W: AsRef<[u8]>>(name: &[&str], key: &Key<'_>, words: &[W]) -> Self {
        let mut commands = Self::new();
        commands.add_on_key(name, key, words);
        commands
    }

    /// One script with its keys and arguments.
    pub(super) fn run<A: AsRef<[u8]>>(
        script: &'static Script,
        keys: &[Key<'_>],
        args: &[A],
    ) -> Self {
        let mut commands = Self::new();
        commands.script(script, keys, args.len());
        args.iter().for_each(|arg| commands.arg(arg));
        commands
    }

    /// Adds a command with all its words.
    pub(super) fn add<W: AsRef<[u8]>>(&mut self, words: &[W]) {
        self.begin(words.len());
        words.iter().for_each(|word| self.arg(word));
    }

    /// Adds a command on a key: its name, the key, and the words after it.
    pub(super) fn add_on_key<W: AsRef<[u8]>>(&mut self, name: &[&str], key: &Key<'_>, words: &[W]) {
        self.begin(name.len() + 1 + words.len());
        name.iter().for_each(|word| self.arg(word));
        self.arg_key(key);
        words.iter().for_each(|word| self.arg(word));
    }

    /// Adds commands that take effect together, in order, or not at all: the server executes them on `EXEC`, unless it
    /// rejected one of them before. Their replies are those of [`Cursor::transaction`](super::reply::Cursor::transaction).
    pub(super) fn transaction(&mut self, add: impl FnOnce(&mut Self)) {
        let start = self.count;
        self.add(&["MULTI"]);
        add(self);
        self.add(&["EXEC"]);
        self.transactions.push(start..self.count);
    }

    pub(super) fn has_transactions(&self) -> bool {
        !self.transactions.is_empty()
    }

    /// Starts a command of this many words, including its name; `arg` adds them.
    pub(super) fn begin(&mut self, words: usize) {
        debug_assert_eq!(self.missing, 0, "the previous command is complete");
        put_count(&mut self.bytes, b'*', words);
        self.missing = words;
    }

    /// Starts a script call with its keys; `arg` adds the `args` arguments.
    pub(super) fn script(&mut self, script: &'static Script, keys: &[Key<'_>], args: usize) {
        self.scripts.push((self.count, script));
        self.begin(3 + keys.len() + args);
        self.arg("EVALSHA");
        self.arg(script.digest());
        self.arg_number(keys.len() as u64);
        keys.iter().for_each(|key| self.arg_key(key));
    }

    pub(super) fn arg(&mut self, bytes: impl AsRef<[u8]>) {
        put_text(&mut self.bytes, bytes.as_ref());
        self.added(1);
    }

    pub(super) fn arg_key(&mut self, key: &Key<'_>) {
        put_count(&mut self.bytes, b'$', key.len());
        key.parts().iter().for_each(|part| self.bytes.extend_from_slice(part));
        self.bytes.extend_from_slice(b"\r\n");
        self.added(1);
    }

    /// The names and values of an entry, as words.
    pub(super) fn arg_fields(&mut self, fields: &Fields) {
        fields.encode_into(&mut self.bytes);
        self.added(2 * fields.len());
    }

    /// One name and value of an entry, as words.
    pub(super) fn arg_field(&mut self, (name, value): FieldRef<'_>) {
        self.arg(name);
        self.arg(value);
    }

    fn added(&mut self, words: usize) {
        debug_assert!(words <= self.missing, "too many words for the command");
        // An entry without fields adds no word: the command stays as it was.
        if words == 0 {
            return;
        }
        self.missing = self.missing.saturating_sub(words);
        if self.missing == 0 {
            self.count += 1;
        }
    }

    /// Number of bytes so far: the position of the next command.
    pub(super) fn position(&self) -> usize {
        self.bytes.len()
    }

    /// Number of complete commands.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Starts a command with a copy of these earlier bytes; `arg` adds `words` more words.
    pub(super) fn begin_like(&mut self, earlier: Range<usize>, words: usize) {
        debug_assert_eq!(self.missing, 0, "the previous command is complete");
        self.bytes.extend_from_within(earlier);
        self.missing = words;
    }

    pub(super) fn arg_number(&mut self, number: u64) {
        let mut digits = Digits::default();
        self.arg(digits.write(number));
    }

    pub(super) fn arg_id(&mut self, id: EntryId) {
        let (mut ms, mut seq) = (Digits::default(), Digits::default());
        let (ms, seq) = (ms.write(id.ms), seq.write(id.seq));
        let mut text = [b'-'; 41];
        text[..ms.len()].copy_from_slice(ms);
        text[ms.len() + 1..][..seq.len()].copy_from_slice(seq);
        self.arg(&text[..ms.len() + 1 + seq.len()]);
    }

    pub(super) fn encode(self) -> EncodedCommands {
        debug_assert_eq!(self.missing, 0, "the last command is complete");
        let Self { bytes, count, scripts, transactions, .. } = self;
        EncodedCommands { bytes, count, scripts, transactions }
    }
}

impl EncodedCommands {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// The bytes of each command. Computed on demand: only retries need them.
    pub(super) fn commands(&self) -> Vec<&[u8]> {
        let mut rest = self.bytes.as_slice();
        let mut scanner = Scanner::default();
        (0..self.count)
            .map_while(|_| {
                scanner.begin(1);
                let (command, tail) = rest.split_at_checked(scanner.scan(rest).ok()??)?;
                rest = tail;
                Some(command)
            })
            .collect()
    }

    /// A script call with the text of the script instead of its digest.
    pub(super) fn with_text(command: &[u8], text: &str) -> Option<Vec<u8>> {
        const CALL: &[u8] = b"$7\r\nEVALSHA\r\n$40\r\n";
        let head = command.iter().position(|byte| *byte == b'\n')? + 1;
        let rest = command.get(head + CALL.len() + 40 + 2..)?;
        command[head..].starts_with(CALL).then(|| {
            let mut bytes = command[..head].to_vec();
            put_text(&mut bytes, b"EVAL");
            put_text(&mut bytes, text.as_bytes());
            bytes.extend_from_slice(rest);
            bytes
        })
    }

    /// What is sent and re-sent as a whole: single commands, and transactions. Computed on demand: only retries need it.
    pub(super) fn units(&self) -> Vec<Range<usize>> {
        let (mut units, mut at) = (Vec::new(), 0);
        let mut transactions = self.transactions.iter().peekable();
        while at < self.count {
            let unit = transactions.next_if(|unit| unit.start == at).cloned().unwrap_or(at..at + 1);
            at = unit.end;
            units.push(unit);
        }
        units
    }

    /// The script of a command, if it runs one.
    pub(super) fn script(&self, index: usize) -> Option<&'static Script> {
        self.scripts.iter().find(|(at, _)| *at == index).map(|(_, script)| *script)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::LeaseName;
    use crate::redis::keys::Keyspace;

    #[test]
    fn a_command_is_an_array_of_bulk_strings() {
        let mut commands = Commands::new();
        commands.add(&["GET", "a b"]);
        commands.begin(3);
        commands.arg("X");
        commands.arg_number(u64::MAX);
        commands.arg_id(EntryId::MAX);

        let encoded = commands.encode();

        assert_eq!(encoded.len(), 2);
        let commands = encoded.commands();
        assert_eq!(commands[0], b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
        let max = u64::MAX;
        let text = format!("*3\r\n$1\r\nX\r\n$20\r\n{max}\r\n$41\r\n{max}-{max}\r\n");
        assert_eq!(commands[1], text.as_bytes());
    }

    #[test]
    fn a_script_call_can_carry_the_text_of_the_script() {
        let script = &crate::redis::scripts::ACQUIRE;
        let (keys, lease) = (Keyspace::new("app1:", 0, false), LeaseName::new("k").unwrap());
        let encoded = Commands::run(script, &[keys.of(&lease)], &["a"]).encode();
        let with_text = EncodedCommands::with_text(encoded.commands()[0], "return 1").unwrap();
        let expected = Commands::one(&["EVAL", "return 1", "1", "app1:k", "a"]).encode().bytes;
        assert_eq!(with_text, expected);
        let other = Commands::one(&["GET", &"k".repeat(80)]).encode();
        assert_eq!(EncodedCommands::with_text(&other.bytes, "return 1"), None);
    }

    #[test]
    fn a_transaction_is_one_unit() {
        let mut commands = Commands::new();
        commands.add(&["GET", "a"]);
        commands
            .transaction(|commands| ["b", "c"].iter().for_each(|key| commands.add(&["DEL", key])));
        commands.add(&["GET", "d"]);
        let encoded = commands.encode();
        assert_eq!(encoded.len(), 6);
        assert_eq!(encoded.units(), [0..1, 1..5, 5..6]);
    }

    #[test]
    fn an_id_is_encoded_in_the_servers_format() {
        for id in [EntryId::MIN, EntryId::new(1_767_225_600_000, 7)] {
            let mut commands = Commands::new();
            commands.begin(1);
            commands.arg_id(id);
            let text = id.to_string();
            let expected = format!("*1\r\n${}\r\n{text}\r\n", text.len());
            assert_eq!(commands.encode().bytes, expected.as_bytes());
        }
    }
}
