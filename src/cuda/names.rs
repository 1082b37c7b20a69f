//! PTX of several programs, taken apart to be short when compressed, is put together again.
//!
//! `scripts/kernels` takes it apart: which line follows which, what the registers and labels in them are, and
//! the lines, of which there are few once names have no numbers. A name is how many others of its kind were
//! named in this function since it last was: most instructions use what was made just before them, so that
//! they look alike. Which numbers names have means nothing, so the next one is as good as the one that was.
#![forbid(unsafe_code)]

use std::collections::HashMap;

/// In a line, behind the kind of a register or label: a number belongs here.
const NUMBER: u8 = b'#';

/// A name that is new in its function,
const NEW: u8 = 255;
/// and one that others have been named since: its number follows.
const FAR: u8 = 254;

/// The text of the program that stands so far behind the first, with its zero; `None` if that is not there.
pub(super) fn together(apart: &[u8], mut program: usize) -> Option<Vec<u8>> {
    let (counts, rest) = apart.split_first_chunk::<8>()?;
    let [count, bytes] =
        [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|i| counts[at + i])) as usize);
    let (order, rest) = rest.split_at_checked(count.checked_mul(2)?)?;
    let (names, lines) = rest.split_at_checked(bytes)?;
    let lines: Vec<&[u8]> = lines.split_inclusive(|byte| matches!(byte, b'\n' | 0)).collect();
    let mut text = Text { names: names.iter(), ..Text::default() };
    for line in order.chunks_exact(2) {
        let line = *lines.get(usize::from(u16::from_le_bytes([line[0], line[1]])))?;
        text.add(line)?;
        if line.ends_with(&[0]) {
            if program == 0 {
                return Some(text.written);
            }
            program -= 1;
            text = Text { names: text.names, ..Text::default() };
        }
    }
    None
}

#[derive(Default)]
struct Text<'a> {
    names: std::slice::Iter<'a, u8>,
    /// Numbers of each kind, the last one used at the end.
    kinds: HashMap<&'a [u8], Vec<u32>>,
    /// Labels of one function may be those of another, but need not.
    functions: u32,
    written: Vec<u8>,
}

impl<'a> Text<'a> {
    fn add(&mut self, line: &'a [u8]) -> Option<()> {
        if contains(line, b".entry") || contains(line, b".func") {
            self.kinds.clear();
            self.functions += 1;
        }
        for part in line.split_inclusive(|&byte| byte == NUMBER) {
            let Some(part) = part.strip_suffix(&[NUMBER]) else {
                self.written.extend_from_slice(part);
                continue;
            };
            let kind = &part[part.iter().rposition(|byte| matches!(byte, b'%' | b'$'))?..];
            let number = self.number(kind)?;
            self.written.extend_from_slice(part);
            if kind == b"$" {
                self.written.extend_from_slice(format!("L{}_", self.functions).as_bytes());
            }
            self.written.extend_from_slice(number.to_string().as_bytes());
        }
        Some(())
    }

    /// Of what is named next, which is of this kind.
    fn number(&mut self, kind: &'a [u8]) -> Option<u32> {
        let used = self.kinds.entry(kind).or_default();
        let place = match *self.names.next()? {
            NEW => {
                // Registers are counted from 1 on, as the compiler does.
                used.push(u32::try_from(used.len()).ok()? + 1);
                return used.last().copied();
            }
            FAR => {
                let number = u16::from_le_bytes([*self.names.next()?, *self.names.next()?]);
                used.iter().position(|&known| known == u32::from(number))?
            }
            rank => used.len().checked_sub(1 + usize::from(rank))?,
        };
        let number = used.remove(place);
        used.push(number);
        Some(number)
    }
}

fn contains(line: &[u8], word: &[u8]) -> bool {
    line.windows(word.len()).any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::together;

    /// Lines in their order, names, and the lines.
    fn apart(order: &[u16], names: &[u8], lines: &str) -> Vec<u8> {
        let counts = [order.len() as u32, names.len() as u32];
        let order: Vec<u8> = order.iter().flat_map(|line| line.to_le_bytes()).collect();
        [&counts.map(u32::to_le_bytes).concat(), &order, names, lines.as_bytes()].concat()
    }

    #[test]
    fn programs_are_put_together() {
        let lines = ".visible .entry one()\n{\n.reg .pred %p<3>;\nmov.u32 %r#,%tid.x;\nadd.s32 %r#,%r#,1;\n\
            setp.eq.s32 %p#,%r#,%r#;\n@!%p# bra $#;\n$#:\n}\n.entry two()\n\0";
        let order = [0, 1, 2, 3, 4, 4, 5, 6, 6, 7, 7, 8, 9, 3, 6, 8, 10, 9, 3, 10];
        // %r1; %r2 of %r1; %r3 of %r1; %p1 of %r1 and, by its number, %r2; to a label and another; these.
        let names = [255, 255, 1, 255, 1, 255, 0, 254, 2, 0, 0, 255, 0, 255, 1, 1, 255, 255, 255, 255];
        let packed = apart(&order, &names, lines);
        let first = ".visible .entry one()\n{\n.reg .pred %p<3>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r2,%r1,1;\nadd.s32 %r3,%r1,1;\n\
            setp.eq.s32 %p1,%r1,%r2;\n@!%p1 bra $L1_1;\n@!%p1 bra $L1_2;\n$L1_1:\n$L1_2:\n}\n\
            .entry two()\nmov.u32 %r1,%tid.x;\n@!%p1 bra $L2_1;\n}\n\0";
        let second = ".entry two()\nmov.u32 %r1,%tid.x;\n\0";
        for (program, text) in [first, second].into_iter().enumerate() {
            let found = together(&packed, program).expect("it is there");
            assert_eq!(String::from_utf8_lossy(&found), text);
        }
        assert_eq!(together(&packed, 2), None);
        assert!((0..packed.len() - lines.len()).all(|end| together(&packed[..end], 1).is_none()));
    }

    #[test]
    fn what_is_not_there_is_told() {
        let line = ".entry one()\nmov.u32 %r#,1;\n\0";
        let is_good = |order: &[u16], names: &[u8]| together(&apart(order, names, line), 0).is_some();
        assert!(is_good(&[0, 1, 1, 2], &[255, 254, 1, 0]));
        // A line, a name, those before it, a number.
        assert!(!is_good(&[0, 3, 2], &[]));
        assert!(!is_good(&[0, 1, 2], &[]));
        assert!(!is_good(&[0, 1, 2], &[0]));
        assert!(!is_good(&[0, 1, 0, 1, 2], &[255, 0]));
        assert!(!is_good(&[0, 1, 1, 2], &[255, 1]));
        assert!(!is_good(&[0, 1, 1, 2], &[255, 254, 2, 0]));
        assert!(!is_good(&[0, 1, 1, 2], &[255, 254, 1]));
        assert_eq!(together(&apart(&[0, 1], &[255], "mov.u32 #,1;\n\0"), 0), None);
        assert_eq!(together(&[255; 16], 0), None);
    }
}
