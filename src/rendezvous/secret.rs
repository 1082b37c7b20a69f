//! The secret of a job: what a peer must know before a byte of it reaches the engine.

#![forbid(unsafe_code)]

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::sys::random;

/// 32 bytes shared by the ranks of a job and nobody else. Prints as `SecretKey(…)`, compares in constant
/// time.
#[derive(Clone)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// A key from its bytes.
    pub fn new(bytes: [u8; 32]) -> SecretKey {
        SecretKey(bytes)
    }

    /// A fresh key from the kernel's generator.
    pub fn random() -> Result<SecretKey> {
        let mut bytes = [0; 32];
        random::fill(&mut bytes)?;
        Ok(SecretKey(bytes))
    }

    /// The key that a text of any length stands for. It is as hard to guess as the text.
    pub fn from_text(text: &str) -> SecretKey {
        let mut hash = Sha256::new();
        hash.update(b"unisono secret text\0");
        hash.update(text.as_bytes());
        SecretKey(hash.finalize().into())
    }

    /// A key for one purpose: knowing it tells nothing about this key or about those of other purposes.
    pub fn derive(&self, purpose: &str) -> SecretKey {
        SecretKey(self.tag(&[b"unisono derived key", purpose.as_bytes()]))
    }

    /// HMAC-SHA256 over `parts`. Each part is preceded by its length, so moving a boundary changes the tag.
    pub fn tag(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether `tag` is [`SecretKey::tag`] of `parts`. The time taken does not depend on where they differ.
    pub fn verify(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(parts).verify_slice(tag).is_ok()
    }

    /// The bytes, to be written where only the job can read them.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC fills a short key with zeros up to the hash's block of 64 bytes; doing so here leaves nothing
        // to fail.
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        mac.update(&(parts.len() as u64).to_le_bytes());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl PartialEq for SecretKey {
    fn eq(&self, other: &SecretKey) -> bool {
        // Equal tags of one message under two 32-byte keys mean equal keys, and `verify` takes constant time.
        self.verify(&[], &other.tag(&[]))
    }
}

impl Eq for SecretKey {}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_depend_on_key_parts_and_boundaries() {
        let key = SecretKey::new([7; 32]);
        let tag = key.tag(&[b"ab", b"c"]);
        assert!(key.verify(&[b"ab", b"c"], &tag));
        assert!(!key.verify(&[b"a", b"bc"], &tag));
        assert!(!key.verify(&[b"abc"], &tag));
        assert!(!key.verify(&[b"ab", b"c", b""], &tag));
        assert!(!SecretKey::new([8; 32]).verify(&[b"ab", b"c"], &tag));
    }

    #[test]
    fn a_short_long_or_altered_tag_is_refused() {
        let key = SecretKey::new([7; 32]);
        let mut tag = key.tag(&[b"x"]);
        assert!(!key.verify(&[b"x"], &tag[..31]));
        assert!(!key.verify(&[b"x"], &[]));
        assert!(!key.verify(&[b"x"], &[&tag[..], &[0]].concat()));
        tag[31] ^= 1;
        assert!(!key.verify(&[b"x"], &tag));
    }

    #[test]
    fn the_tag_is_hmac_sha256() {
        // HMAC-SHA256 with key 00…00 over eight zero bytes (the count of no parts), from an independent
        // implementation.
        let expected = "f375180aba92888401f1919be4a8715a62763b65c1c10e1d0858e81d4d6f9fd2";
        let tag = SecretKey::new([0; 32]).tag(&[]);
        let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
    }

    #[test]
    fn derived_keys_differ_by_purpose_and_from_their_parent() {
        let key = SecretKey::new([7; 32]);
        assert_eq!(key.derive("store"), key.derive("store"));
        assert_ne!(key.derive("store"), key.derive("links"));
        assert_ne!(key.derive("store"), key);
        assert_ne!(SecretKey::from_text("a"), SecretKey::from_text("b"));
        assert_ne!(SecretKey::random().unwrap(), SecretKey::random().unwrap());
    }

    #[test]
    fn debug_does_not_show_the_bytes() {
        assert_eq!(format!("{:?}", SecretKey::new([0xab; 32])), "SecretKey(…)");
    }
}
