//! JSON as text: the only two things the broker does to a value without decoding it.

/// Removes whitespace between tokens. `text` must be valid JSON; strings are left as they are.
pub(super) fn compact(mut text: String) -> String {
    let (mut in_string, mut escaped) = (false, false);
    text.retain(|character| {
        if in_string {
            match character {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            return true;
        }
        in_string = character == '"';
        !matches!(character, ' ' | '\n' | '\t' | '\r')
    });
    text
}

/// Bytes `raw` would have if it were decoded and written again in compact form: no whitespace, and escapes
/// only where JSON needs them. Without that, a client that writes `é` as `\u00e9` would be charged threefold.
///
/// `raw` must be valid JSON. Numbers count as PostgreSQL will write them, without an exponent: `1e99` has
/// a hundred digits, and a short text of such numbers would become gigabytes there. Repeated members of an
/// object all count.
pub(super) fn compact_len(raw: &str) -> usize {
    let bytes = raw.as_bytes();
    let (mut length, mut at, mut in_string) = (0, 0, false);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b' ' | b'\n' | b'\t' | b'\r' if !in_string => at += 1,
            b'\\' if in_string => {
                let (read, written) = escape(&bytes[at..]);
                at += read;
                length += written;
            }
            b'-' | b'0'..=b'9' if !in_string => {
                let digits = |byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'E');
                let end = bytes[at..].iter().position(|byte| !digits(byte)).map_or(bytes.len(), |n| at + n);
                length += number_len(&raw[at..end]);
                at = end;
            }
            _ => {
                in_string ^= byte == b'"';
                at += 1;
                length += 1;
            }
        }
    }
    length
}

/// Longer than every limit, and small enough to add up.
const TOO_LONG: usize = 1 << 32;

/// At least as long as the number is without its exponent.
fn number_len(number: &str) -> usize {
    match number.split_once(['e', 'E']) {
        None => number.len(),
        Some((mantissa, exponent)) => {
            let zeros = exponent.trim_start_matches(['+', '-', '0']);
            let zeros = if zeros.is_empty() { 0 } else { zeros.parse().unwrap_or(TOO_LONG).min(TOO_LONG) };
            mantissa.len() + zeros
        }
    }
}

/// Length of the escape at the start of `bytes`, as read and as it would be written again.
fn escape(bytes: &[u8]) -> (usize, usize) {
    match bytes.get(1) {
        Some(b'u') => {}
        Some(b'/') => return (2, 1),
        _ => return (2, 2),
    }
    match hex4(bytes) {
        // Characters with a short escape; two bytes of UTF-8; half of a pair that makes one of four bytes.
        0x22 | 0x5c | 0x08 | 0x09 | 0x0a | 0x0c | 0x0d | 0x80..0x800 | 0xd800..0xe000 => (6, 2),
        0..0x20 => (6, 6),
        0x20..0x80 => (6, 1),
        _ => (6, 3),
    }
}

/// The code unit of a `\uXXXX` escape.
fn hex4(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .skip(2)
        .take(4)
        .fold(0, |unit, &digit| unit * 16 + char::from(digit).to_digit(16).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compact_keeps_strings_and_numbers() {
        for (text, expected) in [
            (r#"[{"a": 1, "b": "x, y: z"}]"#, r#"[{"a":1,"b":"x, y: z"}]"#),
            (r#"{"a": "quote \" and , ", "b": 2}"#, r#"{"a":"quote \" and , ","b":2}"#),
            (r#"{"a": "ends in backslash \\", "b" : 1}"#, r#"{"a":"ends in backslash \\","b":1}"#),
            ("[1.50, 12345678901234567890]", "[1.50,12345678901234567890]"),
            ("[ ]", "[]"),
        ] {
            assert_eq!(compact(text.to_owned()), expected);
        }
    }

    #[test]
    fn compact_len_equals_a_real_rewrite() {
        for raw in [
            "null",
            r#"{"a" : [1, 2.50, -7 ], "b":"x y"}"#,
            r#""\u00e9\u20ac\ud83d\ude00""#,
            r#""é€😀""#,
            r#""\/ \" \\ \n \u000a \u0001 \u0041 \u007f""#,
            "[\n\t1,\r\n 2 ]",
            r#"["1e99", -0.5, 12]"#,
        ] {
            let value: serde_json::Value = serde_json::from_str(raw).unwrap();
            assert_eq!(compact_len(raw), value.to_string().len(), "{raw}");
        }
    }

    #[test]
    fn numbers_count_without_their_exponent() {
        for (raw, least, most) in [
            ("1e3", 4, 4),
            ("-1.5E+10", 12, 14),
            ("25e-4", 6, 6),
            ("1e0", 1, 1),
            ("1e131071", 131_072, 131_072),
            ("[1e131071,1e131071]", 262_147, 262_147),
            ("1e99999999999999999999999", 1 << 32, usize::MAX),
            ("[1e99999999999999999999999,1e99999999999999999999999]", 1 << 32, usize::MAX),
        ] {
            let length = compact_len(raw);
            assert!(length >= least && length <= most, "{raw}: {length}");
        }
    }
}
