//! Commands on their way to a server, packed once in the task of the caller.
//!
//! Upstream: every call of this backend. Downstream: `link` and `connection`, which only move the bytes.

use std::ops::Range;

use super::reply::Scanner;
use super::scripts::Script;
use crate::entry::{Digits, EntryId, Fields, put_count, put_text};

/// Commands that travel together, in order, all of one slot.
#[derive(Debug, Default)]
pub(super) struct Commands {
    bytes: Vec<u8>,
    /// How many commands are complete.
    count: usize,
    /// Which of them run a script.
    scripts: Vec<(usize, &'static Script)>,
    /// How many arguments of the last command are still to come.
    missing: usize,
}

/// Commands that are ready to be sent, and sent again if the server refused them.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) bytes: Vec<u8>,
    count: usize,
    scripts: Vec<(usize, &'static Script)>,
}

impl Commands {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ..Self::default() }
    }

    /// One command whose words are all at hand.
    pub(super) fn one<W: AsRef<[u8]>>(words: &[W]) -> Self {
        let mut commands = Self::new();
        commands.add(words);
        commands
    }

    /// One script with its keys and arguments.
    pub(super) fn run<K: AsRef<str>, A: AsRef<[u8]>>(
        script: &'static Script,
        keys: &[K],
        args: &[A],
    ) -> Self {
        let mut commands = Self::new();
        commands.script(script, keys, args.len());
        args.iter().for_each(|arg| commands.arg(arg));
        commands
    }

    /// Adds a command whose words are all at hand.
    pub(super) fn add<W: AsRef<[u8]>>(&mut self, words: &[W]) {
        self.begin(words.len());
        words.iter().for_each(|word| self.arg(word));
    }

    /// Begins a command of this many words, its name included; they follow by `arg`.
    pub(super) fn begin(&mut self, words: usize) {
        debug_assert_eq!(self.missing, 0, "the command before is complete");
        put_count(&mut self.bytes, b'*', words);
        self.missing = words;
    }

    /// Begins a script with all its keys; `args` arguments follow by `arg`.
    pub(super) fn script<K: AsRef<str>>(
        &mut self,
        script: &'static Script,
        keys: &[K],
        args: usize,
    ) {
        self.scripts.push((self.count, script));
        self.begin(3 + keys.len() + args);
        self.arg("EVALSHA");
        self.arg(script.digest());
        self.arg_number(keys.len() as u64);
        keys.iter().for_each(|key| self.arg(key.as_ref()));
    }

    pub(super) fn arg(&mut self, bytes: impl AsRef<[u8]>) {
        put_text(&mut self.bytes, bytes.as_ref());
        self.took(1);
    }

    /// The names and values of an entry, as words.
    pub(super) fn arg_fields(&mut self, fields: &Fields) {
        fields.put_into(&mut self.bytes);
        self.took(2 * fields.len());
    }

    fn took(&mut self, words: usize) {
        debug_assert!(words <= self.missing, "no more words than announced");
        // None are taken of a command that was complete before.
        if words == 0 {
            return;
        }
        self.missing = self.missing.saturating_sub(words);
        if self.missing == 0 {
            self.count += 1;
        }
    }

    /// How many bytes there are so far: the place of what comes next.
    pub(super) fn position(&self) -> usize {
        self.bytes.len()
    }

    /// How many commands are complete.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// The bytes from this place on.
    pub(super) fn bytes_from(&self, position: usize) -> &[u8] {
        &self.bytes[position..]
    }

    /// Begins a command with the same bytes as an earlier one; `words` follow by `arg`.
    pub(super) fn begin_like(&mut self, earlier: Range<usize>, words: usize) {
        debug_assert_eq!(self.missing, 0, "the command before is complete");
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

    pub(super) fn pack(self) -> Packed {
        debug_assert_eq!(self.missing, 0, "the last command is complete");
        Packed { bytes: self.bytes, count: self.count, scripts: self.scripts }
    }
}

impl Packed {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// The bytes of each command. They are looked for only here, for most commands are sent once and as one.
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

    /// The script that one command runs, if it does.
    pub(super) fn script(&self, index: usize) -> Option<&'static Script> {
        self.scripts.iter().find(|(at, _)| *at == index).map(|(_, script)| *script)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_an_array_of_counted_words() {
        let mut commands = Commands::new();
        commands.add(&["GET", "a b"]);
        commands.begin(3);
        commands.arg("X");
        commands.arg_number(u64::MAX);
        commands.arg_id(EntryId::MAX);

        let packed = commands.pack();

        assert_eq!(packed.len(), 2);
        let commands = packed.commands();
        assert_eq!(commands[0], b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
        let max = u64::MAX;
        let text = format!("*3\r\n$1\r\nX\r\n$20\r\n{max}\r\n$41\r\n{max}-{max}\r\n");
        assert_eq!(commands[1], text.as_bytes());
    }

    #[test]
    fn an_id_is_written_as_the_server_reads_it() {
        for id in [EntryId::MIN, EntryId::new(1_767_225_600_000, 7)] {
            let mut commands = Commands::new();
            commands.begin(1);
            commands.arg_id(id);
            let text = id.to_string();
            let expected = format!("*1\r\n${}\r\n{text}\r\n", text.len());
            assert_eq!(commands.pack().bytes, expected.as_bytes());
        }
    }
}
