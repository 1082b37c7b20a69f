//! PTX whose registers and labels have lost their numbers, to be short when compressed, gets numbers again.
//!
//! `scripts/kernels` writes, for the number of a register or label, how many others of its kind were named in
//! this function since it last was, or `!` where it never was: most instructions use what was made just
//! before them, so that they look alike. Which numbers names have means nothing, so the next one is as good
//! as the one that was.
#![forbid(unsafe_code)]

use std::collections::HashMap;

/// The text with numbers; `None` if a name is nobody's.
pub(super) fn number(text: &[u8]) -> Option<Vec<u8>> {
    // The names of each kind, the last one used at the end.
    let mut kinds: HashMap<&[u8], Vec<u32>> = HashMap::new();
    let mut numbered = Vec::with_capacity(text.len() + text.len() / 4);
    // Labels of one function may be those of another, but need not.
    let mut functions = 0;
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        if contains(line, b".entry") || contains(line, b".func") {
            kinds.clear();
            functions += 1;
        }
        let mut rest = line;
        while let Some(begin) = rest.iter().position(|byte| matches!(byte, b'%' | b'$')) {
            let after = |from: usize, is: fn(&u8) -> bool| {
                rest[from..].iter().position(|byte| !is(byte)).map_or(rest.len(), |at| from + at)
            };
            let kind_end = after(begin + 1, u8::is_ascii_lowercase);
            let digits_end = after(kind_end, u8::is_ascii_digit);
            let (kind, digits) = (&rest[begin..kind_end], &rest[kind_end..digits_end]);
            let is_new = rest.get(kind_end) == Some(&b'!');
            let end = if is_new { kind_end + 1 } else { digits_end };
            numbered.extend_from_slice(&rest[..kind_end]);
            rest = &rest[end..];
            if !is_new && digits.is_empty() {
                // A special register, or how many there are of a kind.
                continue;
            }
            let names = kinds.entry(kind).or_default();
            let name = if is_new {
                // Kinds of registers are counted from 1 on, as the compiler does.
                u32::try_from(names.len()).ok()? + 1
            } else {
                let rank: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
                names.remove(names.len().checked_sub(rank)?.checked_sub(1)?)
            };
            names.push(name);
            if kind == b"$" {
                numbered.extend_from_slice(format!("L{functions}_").as_bytes());
            }
            numbered.extend_from_slice(name.to_string().as_bytes());
        }
        numbered.extend_from_slice(rest);
    }
    Some(numbered)
}

fn contains(line: &[u8], word: &[u8]) -> bool {
    line.windows(word.len()).any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn names_get_their_numbers_by_when_they_were_used() {
        let short = ".visible .entry one()\n{\n.reg .pred %p<3>;\n.reg .b32 %r<4>;\nmov.u32 %r!,%tid.x;\nadd.s32 %r!,%r1,1;\n\
            mul.lo.s32 %r!,%r2,%r2;\nsetp.eq.s32 %p!,%r0,%r2;\n@!%p0 bra $!;\nbra.uni $!;\n$1:\n@%p0 bra $1;\n$1:\nret;\n}\n\
            .entry two()\n{\nmov.u64 %rd!,0;\n$!:\nbra.uni $0;\n}\n\0";
        let long = ".visible .entry one()\n{\n.reg .pred %p<3>;\n.reg .b32 %r<4>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r2,%r1,1;\n\
            mul.lo.s32 %r3,%r2,%r1;\nsetp.eq.s32 %p1,%r1,%r3;\n@!%p1 bra $L1_1;\nbra.uni $L1_2;\n$L1_1:\n@%p1 bra $L1_2;\n\
            $L1_1:\nret;\n}\n.entry two()\n{\nmov.u64 %rd1,0;\n$L2_1:\nbra.uni $L2_1;\n}\n\0";
        let numbered = number(short.as_bytes()).expect("a text");
        assert_eq!(String::from_utf8_lossy(&numbered), long);
    }

    #[test]
    fn a_name_of_nothing_is_told() {
        assert_eq!(number(b".entry one()\nadd.s32 %r!,%r0,%r1;\n"), None);
        assert_eq!(number(b"mov.u32 %r!,1;\n.entry two()\nmov.u32 %r0,2;\n"), None);
        assert_eq!(number(b"mov.u32 %r99999999999999999999999,1;\n"), None);
        assert_eq!(number(format!("mov.u32 %r{},1;\n", usize::MAX).as_bytes()), None);
    }
}
