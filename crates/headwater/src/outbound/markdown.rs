//! Sanitizes the Markdown of a model for GitHub and GitLab.
//!
//! Upstream: `comment`. Guarantees: the output mentions no user, loads no image, has no links except bare URLs, and
//! contains no HTML, no GitLab quick action and no reply marker. Emphasis, lists, headings and code are kept. Code is
//! unchanged, except that language names are removed, because some of them render diagrams and maps.
//!
//! How: everything outside of code that could start one of these is escaped, so no parser has to be trusted. Code is
//! detected here and delimited again so that every CommonMark parser ends it at the same place: a code span is on one
//! line, unmatched backticks are escaped, and a fence is on its own line and longer than any run of backticks inside.

use crate::outbound::marker;

/// Invisible, not a line break, and ends a name, a quick action and a marker.
const WORD_JOINER: char = '\u{2060}';

/// Sanitizes `content` to at most `bytes_max` bytes; a trailing `…` marks a truncation.
pub(super) fn sanitized(content: &str, bytes_max: usize) -> String {
    // A lone carriage return is a line end in Markdown, too.
    let content = content.replace("\r\n", "\n").replace('\r', "\n");
    let content = content.replace(is_bidirectional_control, "");
    let mut output = MarkdownWriter::new(bytes_max);
    let mut lines = content.split('\n').peekable();
    while let Some(line) = lines.next() {
        match CodeFence::opened_by(line) {
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

/// A code fence in the input.
struct CodeFence<'a> {
    run: &'a str,
    indent: usize,
}

impl<'a> CodeFence<'a> {
    fn opened_by(line: &'a str) -> Option<Self> {
        let trimmed = line.trim_start_matches([' ', '\t']);
        let delimiter = trimmed.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let (run, info) = trimmed.split_at(run_length(trimmed, delimiter));
        // With a second run of backticks on the line, the first one starts a code span.
        let is_fence = run.len() >= 3 && (delimiter == '~' || !info.contains('`'));
        is_fence.then_some(Self { run, indent: line.len() - trimmed.len() })
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim_matches([' ', '\t']);
        line.len() >= self.run.len() && line.chars().all(|c| self.run.starts_with(c))
    }

    /// Removes the indentation of the fence.
    fn unindented<'b>(&self, line: &'b str) -> &'b str {
        let spaces = line.bytes().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        &line[spaces.min(self.indent)..]
    }
}

/// The output and its remaining space.
struct MarkdownWriter {
    text: String,
    bytes_left: usize,
    is_truncated: bool,
}

const TRUNCATION_MARK: &str = "…";

impl MarkdownWriter {
    fn new(bytes_max: usize) -> Self {
        Self {
            text: String::new(),
            bytes_left: bytes_max.saturating_sub(TRUNCATION_MARK.len()),
            is_truncated: false,
        }
    }

    /// Appends `text` as a whole. After the first one that does not fit, nothing is appended.
    fn push(&mut self, text: &str) {
        if self.is_truncated {
            return;
        }
        match self.bytes_left.checked_sub(text.len()) {
            Some(left) => {
                self.text.push_str(text);
                self.bytes_left = left;
            }
            None => {
                self.text.push_str(TRUNCATION_MARK);
                self.is_truncated = true;
            }
        }
    }

    fn code_block(&mut self, code: &[&str]) {
        let longest = code.iter().map(|line| longest_run(line)).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        // On its own line after an empty one, so that it is a fence in any context.
        let before = if self.text.is_empty() { "" } else { "\n" };
        let mut block = format!("{before}{fence}\n");
        for line in code {
            block.push_str(&code_text(line));
            block.push('\n');
        }
        block.push_str(&fence);
        block.push('\n');
        // Pushed as a whole: truncated, the block would not be closed.
        self.push(&block);
    }

    fn text_line(&mut self, line: &str) {
        let trimmed = line.trim_start();
        let mut rest = line;
        // At the start of a line, GitLab treats it as a quick action: `/close`, `/assign`.
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
                // Links, images and footnotes; tables, whose cells split code; math; escapes.
                '[' | ']' | '|' | '$' | '\\' => self.push(&format!("\\{c}")),
                '@' => self.push(&format!("@{WORD_JOINER}")),
                c => self.push(c.encode_utf8(&mut [0; 4])),
            }
        }
    }
}

/// The code up to the next run of backticks of the same length, and the rest.
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

/// Unchanged code, except reply markers, which are searched for in the whole text of a comment.
fn code_text(code: &str) -> String {
    code.replace(marker::PREFIX, &format!("<{WORD_JOINER}{}", &marker::PREFIX[1..]))
}

/// Characters that change the display order of text, such as a URL.
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

    /// The result of an independent parser with the extensions of GitHub and GitLab.
    struct Rendered {
        text: String,
        code: Vec<String>,
        unexpected: Vec<String>,
    }

    fn shown(markdown: &str) -> Rendered {
        let mut shown = Rendered { text: String::new(), code: Vec::new(), unexpected: Vec::new() };
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
                | Event::TaskListMarker(_) => shown.unexpected.push(format!("{event:?}")),
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
        prop_assert!(
            shown.unexpected.is_empty(),
            "{content:?} became {markdown:?}: {:?}",
            shown.unexpected
        );
        prop_assert!(!has_mention(&shown.text), "{content:?} became {markdown:?}");
        prop_assert!(!markdown.contains(marker::PREFIX), "{content:?} became {markdown:?}");
        // GitLab ignores quick actions in code blocks.
        let outside = without_code_blocks(&markdown);
        let command = outside.lines().find(|line| line.trim_start().starts_with('/'));
        prop_assert!(command.is_none(), "{content:?} became {markdown:?}");
        Ok(markdown)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_mixture_of_markup_is_rendered_as_text_and_code_only(
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
        fn any_text_is_rendered_as_text(content in any::<String>()) {
            check(&content, ROOM)?;
        }
    }

    #[test]
    fn images_links_mentions_html_and_quick_actions_are_text() {
        let content = "Hi @ada, see [bank](https://evil.example) ![p](https://evil.example/p.png)\n/close\n<b>&amp;</b>";
        let markdown = check(content, ROOM).unwrap();
        let shown = shown(&markdown).text.replace(WORD_JOINER, "");
        assert_eq!(shown.trim_end(), content, "{markdown}");
    }

    #[test]
    fn code_is_verbatim_and_formatting_is_kept() {
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
    fn truncated_code_is_omitted() {
        let content =
            "Look:\n```\n[bank](https://evil.example)\n```\nDone `[x](https://evil.example)`";
        for bytes_max in 3..content.len() + 20 {
            check(content, bytes_max).unwrap();
        }
    }
}
