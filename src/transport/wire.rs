//! Reading and writing small little-endian messages.

#![forbid(unsafe_code)]

/// Takes fields off the front of a message. `None` once it is too short.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A text with its length in one byte.
    pub(super) fn text(&mut self) -> Option<String> {
        let len = self.u8()?;
        String::from_utf8(self.bytes(len.into())?.to_vec()).ok()
    }

    /// Whether every byte was taken.
    pub(super) fn is_done(&self) -> bool {
        self.0.is_empty()
    }
}

/// Appends what [`Reader::text`] reads; a text longer than 255 bytes is cut.
pub(super) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let most = text.len().min(255);
    let len = (0..=most).rev().find(|&len| text.is_char_boundary(len)).expect("0 is a boundary");
    bytes.push(len as u8);
    bytes.extend_from_slice(&text.as_bytes()[..len]);
}
