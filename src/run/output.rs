//! Makes one stream of whole lines out of many streams of bytes.
#![forbid(unsafe_code)]

/// How much of an unfinished line is held back. A longer line is shown in pieces.
const HELD: usize = 8 << 20;

/// The lines of all ranks on their way to one output.
///
/// A line is shown when it is complete, so that lines of different ranks never mix. No byte is lost or
/// changed. A newline is added only where an unfinished line has to be shown (it is too long to hold, or its
/// rank has ended) and another rank's line follows it.
pub(super) struct Lines {
    sources: Vec<Source>,
    /// Whose unfinished line has been shown last and could go on.
    open: Option<usize>,
}

struct Source {
    prefix: String,
    held: Vec<u8>,
}

impl Lines {
    /// One source for each prefix.
    pub(super) fn new(prefixes: impl IntoIterator<Item = String>) -> Lines {
        let sources = prefixes.into_iter().map(|prefix| Source { prefix, held: Vec::new() }).collect();
        Lines { sources, open: None }
    }

    /// Takes what `source` has written; appends to `shown` what can be shown now.
    pub(super) fn feed(&mut self, source: usize, bytes: &[u8], shown: &mut Vec<u8>) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = rest.split_at(end + 1);
            self.begin(source, shown);
            shown.append(&mut self.sources[source].held);
            shown.extend_from_slice(line);
            self.open = None;
            rest = after;
        }
        self.sources[source].held.extend_from_slice(rest);
        if self.sources[source].held.len() > HELD {
            self.flush(source, shown);
        }
    }

    /// Shows the unfinished line of `source`, if there is one.
    pub(super) fn flush(&mut self, source: usize, shown: &mut Vec<u8>) {
        if !self.sources[source].held.is_empty() {
            self.begin(source, shown);
            shown.append(&mut self.sources[source].held);
            self.open = Some(source);
        }
    }

    /// Whether `source` has an unfinished line that is not shown.
    pub(super) fn holds(&self, source: usize) -> bool {
        !self.sources[source].held.is_empty()
    }

    /// Ends a line that was left open, for text that comes from no source.
    pub(super) fn close(&mut self, shown: &mut Vec<u8>) {
        if self.open.take().is_some() {
            shown.push(b'\n');
        }
    }

    /// Goes to where the next byte of `source` belongs: behind its open line, or behind its prefix on a new
    /// one.
    fn begin(&mut self, source: usize, shown: &mut Vec<u8>) {
        if self.open != Some(source) {
            self.close(shown);
            shown.extend_from_slice(self.sources[source].prefix.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Lines {
        Lines::new(["[0] ".to_owned(), "[1] ".to_owned()])
    }

    fn text(shown: &[u8]) -> &str {
        std::str::from_utf8(shown).unwrap()
    }

    #[test]
    fn lines_never_mix() {
        let (mut lines, mut shown) = (two(), Vec::new());
        lines.feed(0, b"a", &mut shown);
        lines.feed(1, b"x\ny", &mut shown);
        lines.feed(0, b"b\n\nc", &mut shown);
        lines.feed(1, b"\n", &mut shown);
        assert_eq!(text(&shown), "[1] x\n[0] ab\n[0] \n[1] y\n");
        assert!(lines.holds(0) && !lines.holds(1));
        lines.flush(0, &mut shown);
        assert!(shown.ends_with(b"\n[0] c"));
    }

    #[test]
    fn an_unfinished_line_goes_on_or_is_ended() {
        let (mut lines, mut shown) = (two(), Vec::new());
        lines.feed(0, b"50 %", &mut shown);
        lines.flush(0, &mut shown);
        lines.feed(0, b" 100 %\n", &mut shown);
        lines.feed(0, b"more", &mut shown);
        lines.flush(0, &mut shown);
        lines.feed(1, b"x\n", &mut shown);
        lines.feed(0, b"!\n", &mut shown);
        assert_eq!(text(&shown), "[0] 50 % 100 %\n[0] more\n[1] x\n[0] !\n");
    }

    #[test]
    fn a_line_too_long_to_hold_is_shown_in_pieces_and_whole() {
        let (mut lines, mut shown) = (Lines::new([String::new()]), Vec::new());
        let piece = vec![0xff; HELD / 3];
        for _ in 0..7 {
            lines.feed(0, &piece, &mut shown);
        }
        assert!(shown.len() > HELD, "held {} bytes of {}", piece.len() * 7 - shown.len(), piece.len() * 7);
        lines.flush(0, &mut shown);
        assert_eq!(shown.len(), piece.len() * 7);
        assert!(shown.iter().all(|byte| *byte == 0xff));
    }
}
