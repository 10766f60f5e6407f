//! Incremental parser for server-sent events.
//!
//! Upstream: `openai` feeds it the response body. Guarantees: it buffers at most one line and one event, each within a
//! limit, however the bytes are split. Rejects lines over the limit and text that is not UTF-8.

use crate::limits::LINE_BYTES_MAX;

/// Parser state.
#[derive(Debug, Default)]
pub(crate) struct SseReader {
    line: Vec<u8>,
    data: String,
    has_data: bool,
}

impl SseReader {
    /// Consumes bytes and returns the `data` of the events they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        let mut events = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.line.len() + part.len() > LINE_BYTES_MAX {
                return Err(format!("a line is longer than {LINE_BYTES_MAX} bytes"));
            }
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                events.extend(self.end_line(&line)?);
            }
        }
        Ok(events)
    }

    /// Returns the last event if the body ends without an empty line, as some services do.
    pub(crate) fn finish(mut self) -> Result<Option<String>, String> {
        let line = std::mem::take(&mut self.line);
        let ended = self.end_line(&line)?;
        Ok(ended.or_else(|| self.has_data.then_some(self.data)))
    }

    fn end_line(&mut self, line: &[u8]) -> Result<Option<String>, String> {
        let line = std::str::from_utf8(line).map_err(|_| "a line is not UTF-8".to_owned())?;
        let line = line.trim_end_matches(['\r', '\n']);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return Ok(std::mem::take(&mut self.has_data).then_some(data));
        }
        // Comments, ids and event names are ignored.
        let Some(data) = line.strip_prefix("data:") else { return Ok(None) };
        if self.has_data {
            self.data.push('\n');
        }
        if self.data.len() + data.len() > LINE_BYTES_MAX {
            return Err(format!("an event is longer than {LINE_BYTES_MAX} bytes"));
        }
        self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        self.has_data = true;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str =
        ": hello\r\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:zwei\ndata: drei ü\n\ndata: [DONE]";

    fn read(chunks: &[&[u8]]) -> Vec<String> {
        let mut reader = SseReader::default();
        let mut events: Vec<String> =
            chunks.iter().flat_map(|chunk| reader.feed(chunk).unwrap()).collect();
        events.extend(reader.finish().unwrap());
        events
    }

    #[test]
    fn events_do_not_depend_on_how_the_bytes_are_split() {
        let expected = ["{\"a\":1}", "zwei\ndrei ü", "[DONE]"];
        assert_eq!(read(&[BODY.as_bytes()]), expected);
        for cut in 1..BODY.len() {
            let (first, second) = BODY.as_bytes().split_at(cut);
            assert_eq!(read(&[first, second]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_endless_line_is_rejected_at_the_limit() {
        let mut reader = SseReader::default();
        let chunk = vec![b'x'; LINE_BYTES_MAX / 4];
        let refused = (0..5).any(|_| reader.feed(&chunk).is_err());
        assert!(refused);
    }

    #[test]
    fn invalid_utf8_is_rejected() {
        assert!(SseReader::default().feed(b"data: \xff\xfe\n\n").is_err());
    }
}
