//! Text of a model as Markdown that GitHub and GitLab show as text, and nothing else.
//!
//! Upstream: `comment`. Promises: what a model writes mentions no user, loads no image, makes no link but bare addresses,
//! whose target is what people see, and holds no HTML, no command of GitLab and no mark of ours. Emphasis, lists, headings
//! and code stay. Code is as it was, but for the names of languages: some of them draw diagrams and maps.
//!
//! How: everything outside of code that could open one of these is escaped, so no parser has to be trusted. Code is found
//! here and written anew, delimited so that every parser of CommonMark ends it where it ends here: a code span is on one
//! line, all backticks that delimit nothing are escaped, a fence stands alone and is longer than any run of backticks in it.

use crate::outbound::marker;

/// Invisible, breaks no line, and ends a name, a command and a mark.
const WORD_JOINER: char = '\u{2060}';

/// Sanitised Markdown of at most `bytes_max` bytes; `…` at its end says that it was cut.
pub(super) fn sanitized(content: &str, bytes_max: usize) -> String {
    // A lone carriage return ends a line in Markdown, too.
    let content = content.replace("\r\n", "\n").replace('\r', "\n");
    let content = content.replace(is_bidirectional_control, "");
    let mut output = Output::new(bytes_max);
    let mut lines = content.split('\n').peekable();
    while let Some(line) = lines.next() {
        match Fence::opened_by(line) {
            Some(fence) => {
                let mut code = Vec::new();
                for line in lines.by_ref() {
                    if fence.is_closed_by(line) {
                        break;
                    }
                    code.push(fence.unindented(line));
                }
                output.code_block(&code);
            }
            None => output.text_line(line),
        }
        if lines.peek().is_some() {
            output.push("\n");
        }
    }
    output.text
}

/// The fence of a code block as the model wrote it.
struct Fence<'a> {
    run: &'a str,
    indent: usize,
}

impl<'a> Fence<'a> {
    fn opened_by(line: &'a str) -> Option<Self> {
        let trimmed = line.trim_start_matches([' ', '\t']);
        let delimiter = trimmed.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let (run, info) = trimmed.split_at(run_length(trimmed, delimiter));
        // A second run of backticks makes the first one that of a code span.
        let is_fence = run.len() >= 3 && (delimiter == '~' || !info.contains('`'));
        is_fence.then_some(Self { run, indent: line.len() - trimmed.len() })
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim_matches([' ', '\t']);
        line.len() >= self.run.len() && line.chars().all(|c| self.run.starts_with(c))
    }

    /// Without the indentation that the fence had.
    fn unindented<'b>(&self, line: &'b str) -> &'b str {
        let spaces = line.bytes().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        &line[spaces.min(self.indent)..]
    }
}

/// What was written so far, and how much more may be.
struct Output {
    text: String,
    bytes_left: usize,
    is_cut: bool,
}

const CUT: &str = "…";

impl Output {
    fn new(bytes_max: usize) -> Self {
        Self { text: String::new(), bytes_left: bytes_max.saturating_sub(CUT.len()), is_cut: false }
    }

    /// Adds a piece whole; from the first that has no room on, nothing is added.
    fn push(&mut self, piece: &str) {
        if self.is_cut {
            return;
        }
        match self.bytes_left.checked_sub(piece.len()) {
            Some(left) => {
                self.text.push_str(piece);
                self.bytes_left = left;
            }
            None => {
                self.text.push_str(CUT);
                self.is_cut = true;
            }
        }
    }

    fn code_block(&mut self, code: &[&str]) {
        let longest = code.iter().map(|line| longest_run(line)).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        // A line of its own, at the beginning of a line, after an empty one: so it is a fence wherever it stands.
        let before = if self.text.is_empty() { "" } else { "\n" };
        let mut block = format!("{before}{fence}\n");
        for line in code {
            block.push_str(&code_text(line));
            block.push('\n');
        }
        block.push_str(&fence);
        block.push('\n');
        // Cut, it would not end.
        self.push(&block);
    }

    fn text_line(&mut self, line: &str) {
        let trimmed = line.trim_start();
        let mut rest = line;
        // At the beginning of a line, GitLab takes it for a command: `/close`, `/assign`.
        if let Some(after) = trimmed.strip_prefix('/') {
            self.push("\\/");
            rest = after;
        }
        while let Some(c) = rest.chars().next() {
            if c == '`' {
                let (run, after) = rest.split_at(run_length(rest, '`'));
                rest = match code_span(run, after) {
                    Some((code, after)) => {
                        let delimiter = "`".repeat(longest_run(code) + 1);
                        self.push(&format!("{delimiter}{}{delimiter}", code_text(code)));
                        after
                    }
                    None => {
                        self.push(&"\\`".repeat(run.len()));
                        after
                    }
                };
                continue;
            }
            rest = &rest[c.len_utf8()..];
            match c {
                '&' => self.push("&amp;"),
                '<' => self.push("&lt;"),
                '>' => self.push("&gt;"),
                // Links, images, footnotes; tables, whose cells cut code in two; formulas; escapes.
                '[' | ']' | '|' | '$' | '\\' => self.push(&format!("\\{c}")),
                '@' => self.push(&format!("@{WORD_JOINER}")),
                c => self.push(c.encode_utf8(&mut [0; 4])),
            }
        }
    }
}

/// The code between this run of backticks and the next one of the same length, and what follows it.
fn code_span<'a>(run: &str, after: &'a str) -> Option<(&'a str, &'a str)> {
    let mut from = 0;
    while let Some(found) = after[from..].find('`') {
        let at = from + found;
        let length = run_length(&after[at..], '`');
        if length == run.len() {
            let code = &after[..at];
            let is_plain = !code.contains('|');
            return is_plain.then(|| (code, &after[at + length..]));
        }
        from = at + length;
    }
    None
}

/// Code as it was, but for what is found in the text of a comment wherever it stands: marks of ours.
fn code_text(code: &str) -> String {
    code.replace(marker::PREFIX, &format!("<{WORD_JOINER}{}", &marker::PREFIX[1..]))
}

/// Characters that show text, such as an address, in another order than it has.
fn is_bidirectional_control(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn run_length(text: &str, c: char) -> usize {
    text.chars().take_while(|one| *one == c).count()
}

fn longest_run(text: &str) -> usize {
    text.split(|c| c != '`').map(str::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pulldown_cmark::{Event, Options, Parser, Tag};

    use super::*;

    const ROOM: usize = 1_000_000;

    /// What an independent parser, with the extensions of GitHub and GitLab, makes of it.
    struct Shown {
        text: String,
        code: Vec<String>,
        odd: Vec<String>,
    }

    fn shown(markdown: &str) -> Shown {
        let mut shown = Shown { text: String::new(), code: Vec::new(), odd: Vec::new() };
        let mut is_code = false;
        let extensions = Options::ENABLE_TABLES
            | Options::ENABLE_FOOTNOTES
            | Options::ENABLE_STRIKETHROUGH
            | Options::ENABLE_TASKLISTS
            | Options::ENABLE_MATH
            | Options::ENABLE_GFM
            | Options::ENABLE_WIKILINKS;
        for event in Parser::new_ext(markdown, extensions) {
            match event {
                Event::Start(Tag::CodeBlock(_)) => {
                    is_code = true;
                    shown.code.push(String::new());
                }
                Event::End(pulldown_cmark::TagEnd::CodeBlock) => is_code = false,
                Event::Text(text) if is_code => shown.code.last_mut().unwrap().push_str(&text),
                Event::Text(text) => shown.text.push_str(&text),
                Event::Code(code) => shown.code.push(code.into_string()),
                Event::SoftBreak | Event::HardBreak => shown.text.push('\n'),
                Event::Start(
                    Tag::Link { .. }
                    | Tag::Image { .. }
                    | Tag::HtmlBlock
                    | Tag::FootnoteDefinition(_)
                    | Tag::Table(_)
                    | Tag::BlockQuote(_),
                )
                | Event::Html(_)
                | Event::InlineHtml(_)
                | Event::InlineMath(_)
                | Event::DisplayMath(_)
                | Event::FootnoteReference(_)
                | Event::TaskListMarker(_) => shown.odd.push(format!("{event:?}")),
                Event::Start(_) => {}
                Event::End(_) => shown.text.push('\n'),
                Event::Rule => {}
            }
        }
        shown
    }

    fn without_code_blocks(markdown: &str) -> String {
        let mut outside = markdown.to_owned();
        for (event, range) in Parser::new(markdown).into_offset_iter() {
            if let Event::Start(Tag::CodeBlock(_)) = event {
                outside.replace_range(range.clone(), &" ".repeat(range.len()));
            }
        }
        outside
    }

    fn has_mention(text: &str) -> bool {
        let names = text.split('@').skip(1);
        names.into_iter().any(|rest| rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    }

    fn check(content: &str, bytes_max: usize) -> Result<String, TestCaseError> {
        let markdown = sanitized(content, bytes_max);
        let shown = shown(&markdown);
        prop_assert!(markdown.len() <= bytes_max, "{} bytes", markdown.len());
        prop_assert!(shown.odd.is_empty(), "{content:?} became {markdown:?}: {:?}", shown.odd);
        prop_assert!(!has_mention(&shown.text), "{content:?} became {markdown:?}");
        prop_assert!(!markdown.contains(marker::PREFIX), "{content:?} became {markdown:?}");
        // GitLab takes no commands from blocks of code.
        let outside = without_code_blocks(&markdown);
        let command = outside.lines().find(|line| line.trim_start().starts_with('/'));
        prop_assert!(command.is_none(), "{content:?} became {markdown:?}");
        Ok(markdown)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn whatever_a_model_writes_no_parser_sees_more_than_text_and_code(
            parts in prop::collection::vec(
                prop::sample::select(vec![
                    "[", "]", "(", ")", "!", "<", ">", "`", "``", "```", "~~~", "\\", "|", "---", "|-|-|", ":-:", "\n", "\n\n",
                    "\r", "\t", "    ", "  ", "- ", "1. ", "> ", "# ", "@ada", "@", "/close", "a", "https://evil.example", "[x]: ",
                    "<!-- headwater:reply k -->", "<img src=x>", "$", "$$", "^1", "*", "_", "&#91;", "\u{202e}", "\u{2060}", "…", "[^1]",
                    "![a](https://evil.example/x.png)", "[bank](https://evil.example)", "```mermaid", "+++", "{", "}", ":", "=",
                ]), 0..40),
            bytes_max in prop_oneof![Just(ROOM), 3_usize..200],
        ) {
            check(&parts.concat(), bytes_max)?;
        }

        #[test]
        fn text_of_any_kind_is_shown_as_text(content in any::<String>()) {
            check(&content, ROOM)?;
        }
    }

    #[test]
    fn images_links_mentions_html_and_commands_are_text() {
        let content = "Hi @ada, see [bank](https://evil.example) ![p](https://evil.example/p.png)\n/close\n<b>&amp;</b>";
        let markdown = check(content, ROOM).unwrap();
        let shown = shown(&markdown).text.replace(WORD_JOINER, "");
        assert_eq!(shown.trim_end(), content, "{markdown}");
    }

    #[test]
    fn code_is_verbatim_and_formatting_stays() {
        let content = "# Title\n\nUse `npm i @types/node[1]` and ``a`b``:\n\n```rust\nlet x: &[u8] = b\"<>\"; // @ada\n/usr/bin/env <!-- x -->\n```\n- **bold**";
        let markdown = check(content, ROOM).unwrap();
        let code = shown(&markdown).code;
        assert_eq!(
            code,
            [
                "npm i @types/node[1]",
                "a`b",
                "let x: &[u8] = b\"<>\"; // @ada\n/usr/bin/env <!-- x -->\n"
            ]
        );
        assert!(
            markdown.starts_with("# Title\n") && markdown.ends_with("- **bold**"),
            "{markdown}"
        );
        assert!(!markdown.contains("rust"), "{markdown}");
    }

    #[test]
    fn code_that_is_cut_off_is_left_out_and_not_opened() {
        let content =
            "Look:\n```\n[bank](https://evil.example)\n```\nDone `[x](https://evil.example)`";
        for bytes_max in 3..content.len() + 20 {
            check(content, bytes_max).unwrap();
        }
    }
}
