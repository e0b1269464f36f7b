//! Finding the end of an object or array, in one piece or in several, 64 bytes at a time: what decides (quotes, escapes, brackets) becomes one bit
//! a byte, so that short strings cost no branch each.

use wide::u8x16;

/// Bytes looked at together.
const BLOCK: usize = 64;
/// The bits at odd places.
const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// Which bytes of a block are what; the first byte is the lowest bit.
struct Marks {
    quote: u64,
    backslash: u64,
    open: u64,
    close: u64,
}

impl Marks {
    fn of(block: &[u8; BLOCK]) -> Self {
        let mut marks = Self { quote: 0, backslash: 0, open: 0, close: 0 };
        let (lanes, _) = block.as_chunks::<16>();
        for (lane, bytes) in lanes.iter().enumerate() {
            let bytes = u8x16::new(*bytes);
            let bits = |is: u8x16| u64::from(is.to_bitmask()) << (lane * 16);
            // One bit is all that `[` and `{`, `]` and `}` differ in.
            let folded = bytes | u8x16::splat(0x20);
            marks.quote |= bits(bytes.simd_eq(u8x16::splat(b'"')));
            marks.backslash |= bits(bytes.simd_eq(u8x16::splat(b'\\')));
            marks.open |= bits(folded.simd_eq(u8x16::splat(b'{')));
            marks.close |= bits(folded.simd_eq(u8x16::splat(b'}')));
        }
        marks
    }
}

/// How far a walk is, between two blocks or two pieces of a text. By default it begins before an object or array. A
/// backslash counts within strings only.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct State {
    depth: u64,
    /// All bits when the next byte is within a string.
    within: u64,
    /// 1 when the next byte is escaped.
    escaped: u64,
}

impl State {
    /// Within so many objects or arrays.
    pub(crate) fn within(depth: u64) -> Self {
        Self { depth, ..Self::default() }
    }

    /// Walks over the next piece; where in it the outermost object or array ends, if it does.
    pub(crate) fn walk(&mut self, piece: &[u8]) -> Option<usize> {
        let (blocks, rest) = piece.as_chunks::<BLOCK>();
        for (number, block) in blocks.iter().enumerate() {
            if let Some(end) = self.block(block, BLOCK) {
                return Some(number * BLOCK + end);
            }
        }
        if rest.is_empty() {
            return None;
        }
        // Filled up with what decides nothing.
        let mut block = [0; BLOCK];
        block[..rest.len()].copy_from_slice(rest);
        Some(blocks.len() * BLOCK + self.block(&block, rest.len())?)
    }

    /// Walks over a block of which the first `length` bytes are the text, at least one; where in it the end is, if it is
    /// there.
    fn block(&mut self, block: &[u8; BLOCK], length: usize) -> Option<usize> {
        let Marks { quote, backslash, open, close } = Marks::of(block);
        let (escaped, carried) = escaped_by(backslash, self.escaped);
        let carried = if length == BLOCK { carried } else { escaped >> length & 1 };
        let within = parity(quote & !escaped) ^ self.within;
        // Outside of strings a backslash escapes nothing. No parser takes such a text, so this may be slow.
        if backslash & !within != 0 {
            return self.bytes(&block[..length]);
        }
        self.escaped = carried;
        self.within = if within >> (BLOCK - 1) == 1 { u64::MAX } else { 0 };
        let (open, close) = (open & !within, close & !within);
        let closed = u64::from(close.count_ones());
        if closed < self.depth {
            self.depth = self.depth + u64::from(open.count_ones()) - closed;
            return None;
        }
        let mut brackets = open | close;
        while brackets != 0 {
            let at = brackets.trailing_zeros();
            if open >> at & 1 == 1 {
                self.depth += 1;
            } else {
                self.depth -= 1;
                if self.depth == 0 {
                    return Some(at as usize + 1);
                }
            }
            brackets &= brackets - 1;
        }
        None
    }

    /// The same, byte by byte.
    fn bytes(&mut self, text: &[u8]) -> Option<usize> {
        for (at, byte) in text.iter().enumerate() {
            let escaped = std::mem::take(&mut self.escaped) == 1;
            match byte {
                b'"' if !escaped => self.within = !self.within,
                b'\\' if self.within != 0 && !escaped => self.escaped = 1,
                b'{' | b'[' if self.within == 0 => self.depth += 1,
                b'}' | b']' if self.within == 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// Which bytes are escaped, and whether the first of the next block is. Of a run of backslashes every second one,
/// from its beginning on, escapes what follows it; subtracting carries along a run, which finds these without a loop.
fn escaped_by(backslash: u64, first: u64) -> (u64, u64) {
    let free = backslash & !first;
    let after = (free << 1) | ODD;
    let alternating = after.wrapping_sub(free) ^ ODD;
    (alternating ^ (backslash | first), (alternating & backslash) >> (BLOCK - 1))
}

/// Each bit becomes the parity of itself and those below it.
fn parity(mut bits: u64) -> u64 {
    for shift in [1, 2, 4, 8, 16, 32] {
        bits ^= bits << shift;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, State};
    use proptest::prelude::*;

    fn end_of_nested(text: &[u8]) -> Option<usize> {
        State::default().walk(text)
    }

    /// A byte at a time, as it was before.
    fn plain(text: &[u8]) -> Option<usize> {
        let (mut depth, mut within, mut at) = (0, false, 0);
        while let Some(byte) = text.get(at) {
            match byte {
                b'\\' if within => at += 1,
                b'"' => within = !within,
                b'{' | b'[' if !within => depth += 1,
                b'}' | b']' if !within => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
            at += 1;
        }
        None
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        /// Dense in what decides, and as long as several blocks.
        #[test]
        fn it_ends_where_a_plain_walk_ends(text in r#"[\[{][\[{\]}"\\ax]{0,40}[a"\\]{0,90}[\[{\]}"\\ ax]{0,150}"#) {
            prop_assert_eq!(end_of_nested(text.as_bytes()), plain(text.as_bytes()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        /// Wherever it is cut.
        #[test]
        fn in_pieces_it_ends_at_the_same_place(
            text in r#"[\[{][\[{\]}"\\ax]{0,40}[a"\\]{0,90}[\[{\]}"\\ ax]{0,150}"#,
            first in 0_usize..200,
            second in 0_usize..200,
        ) {
            let text = text.as_bytes();
            let (first, second) = (first.min(text.len()), second.min(text.len()));
            let (first, second) = (first.min(second), first.max(second));
            let mut state = State::default();
            let mut end = None;
            for (from, to) in [(0, first), (first, second), (second, text.len())] {
                end = end.or_else(|| state.walk(&text[from..to]).map(|at| from + at));
            }
            prop_assert_eq!(end, plain(text));
        }
    }

    #[test]
    fn runs_of_backslashes_cross_blocks() {
        for before in 0..2 * BLOCK {
            for run in 0..2 * BLOCK + 3 {
                let text = format!("{{\"{}{}\"}}\"}}", "a".repeat(before), "\\".repeat(run));
                assert_eq!(end_of_nested(text.as_bytes()), plain(text.as_bytes()), "{before} {run}");
            }
        }
    }

    #[test]
    fn the_end_is_found_at_every_place_of_a_block() {
        for length in 0..3 * BLOCK {
            let text = format!("[{}]", "7".repeat(length));
            assert_eq!(end_of_nested(text.as_bytes()), Some(length + 2));
            assert_eq!(end_of_nested(&text.as_bytes()[..=length]), None, "it does not end");
        }
    }
}
