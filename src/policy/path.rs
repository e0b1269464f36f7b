//! Which paths are canonical (D4). Classification and the cell see the same bytes, so a path that
//! some library in between could read in two ways does not pass at all.

const KV: &str = "/api/v1/kv/";
const TIMERS: &str = "/api/v1/timers/";

/// Whether a raw path (without query) is in canonical form.
///
/// Refused: an empty, `.` or `..` segment (also percent-encoded, also behind an encoded slash or
/// backslash), a backslash, `;`, control and non-ASCII bytes (the first two also encoded), invalid
/// percent-encoding. In the key tail of `/api/v1/kv/{ns}/…` empty segments, `;`, `%2F`, `%5C` and
/// encoded control bytes belong to the key; dot segments stay refused there.
pub fn is_canonical(path: &str) -> bool {
    if is_plainly_canonical(path.as_bytes()) {
        return true;
    }
    if !path.starts_with('/') || !bytes_are_plain(path.as_bytes()) {
        return false;
    }
    let (strict, key) = split_key_tail(path);
    segments_are_plain(strict) && key.is_none_or(|key| !has_dot_segment(key))
}

/// In one pass, what nearly every request sends: nothing encoded, nothing odd, no segment that is empty or
/// begins with a dot.
fn is_plainly_canonical(path: &[u8]) -> bool {
    let mut previous = 0;
    for byte in path {
        let odd = !byte.is_ascii_graphic() || matches!(byte, b'%' | b';' | b'\\');
        if odd || (previous == b'/' && matches!(byte, b'/' | b'.')) {
            return false;
        }
        previous = *byte;
    }
    path.first() == Some(&b'/') && previous != b'/'
}

/// Splits a KV path into what must be strict and the key, when there is one.
fn split_key_tail(path: &str) -> (&str, Option<&str>) {
    let Some(rest) = path.strip_prefix(KV) else {
        return (path, None);
    };
    match rest.find('/') {
        // Without a namespace there is no key tail either: the empty segment stays in.
        None | Some(0) => (path, None),
        Some(end) => (&path[..KV.len() + end], Some(&rest[end + 1..])),
    }
}

/// Printable ASCII without backslash, with every `%` followed by two hex digits.
fn bytes_are_plain(path: &[u8]) -> bool {
    path.iter().enumerate().all(|(at, byte)| match byte {
        b'\\' => false,
        b'%' => path.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)),
        _ => byte.is_ascii_graphic(),
    })
}

/// No empty segment, no dot segment, no `;`, and nothing encoded that means structure to someone:
/// backslash, control bytes.
fn segments_are_plain(path: &str) -> bool {
    let segments = match path {
        // The root, and the two batch routes that the contract also lists with a slash.
        "/" => return true,
        KV | TIMERS => path.trim_end_matches('/'),
        _ => path,
    };
    !segments[1..].split('/').any(str::is_empty)
        && !path.contains(';')
        && !decoded(path).any(|byte| byte == b'\\' || byte.is_ascii_control())
        && !has_dot_segment(path)
}

/// Whether a segment reads `.` or `..` once decoded, with encoded slashes and backslashes
/// counted as separators.
fn has_dot_segment(path: &str) -> bool {
    let mut dots = 0;
    let mut others = false;
    for byte in decoded(path).chain([b'/']) {
        match byte {
            b'/' | b'\\' => {
                if !others && (dots == 1 || dots == 2) {
                    return true;
                }
                dots = 0;
                others = false;
            }
            b'.' => dots += 1,
            _ => others = true,
        }
    }
    false
}

fn decoded(path: &str) -> impl Iterator<Item = u8> {
    percent_encoding::percent_decode_str(path)
}

#[cfg(test)]
mod tests {
    use super::is_canonical;

    #[test]
    fn canonical_paths_pass_and_no_others() {
        let pass = [
            "/",
            "/health",
            "/api/v1/push",
            "/api/v1/pop/queue/a%2Fb/partition/p",
            "/api/v1/pop/queue/caf%C3%A9",
            "/api/v1/pop/queue/...",
            "/api/v1/pop/queue/.hidden",
            "/api/v1/pop/queue/a..b",
            "/api/v1/pop/queue/%252e%252e",
            "/api/v1/kv",
            "/api/v1/kv/",
            "/api/v1/kv/ns/key",
            "/api/v1/kv/ns/a//b",
            "/api/v1/kv/ns//a",
            "/api/v1/kv/ns/a%2Fb",
            "/api/v1/kv/ns/a/",
            "/api/v1/kv/ns/a;b",
            "/api/v1/kv/ns/a%00b", // the cell says what is wrong with it
            "/api/v1/kv/ns/a%5Cb",
            "/api/v1/kv/ns/",
        ];
        for path in pass {
            assert!(is_canonical(path), "{path}");
        }
        let refused = [
            "",
            "api/v1/push",
            "*",
            "//api/v1/push",
            "/api/v1/push/",
            "/api/v1/resources/",
            "/api/v1/kv//",
            "/api//v1/push",
            "/api/v1/resources/../system/maintenance",
            "/api/v1/resources/%2e%2e/system/maintenance",
            "/api/v1/resources/%2E./system",
            "/api/v1/resources/.%2e/system",
            "/api/v1/resources/..%2fsystem",
            "/api/v1/resources/a%2F..%2fb",
            "/api/v1/resources/..%5csystem",
            "/api/v1/./push",
            "/api/v1/push/.",
            "/api/v1/push/..",
            "/..",
            "/api\\v1\\push",
            "/api/v1/a%5cb",
            "/api/v1/push;x",
            "/api/v1/push;x=1/y",
            "/api/v1/pu\tsh",
            "/api/v1/pu sh",
            "/api/v1/push%0a",
            "/api/v1/push%00",
            "/api/v1/push%7f",
            "/api/v1/café",
            "/api/v1/push%",
            "/api/v1/push%4",
            "/api/v1/push%zz",
            "/api/v1/kv//key",
            "/api/v1/kv/../push",
            "/api/v1/kv/ns/../x",
            "/api/v1/kv/ns/%2e%2e/x",
            "/api/v1/kv/ns/a%2f..%2fb",
            "/api/v1/kv/ns/..",
            "/api/v1/kv/ns/.",
            "/api/v1/kv/ns/a\\b",
            "/api/v1/kv/n;s/key",
            "/api/v1/kv/%2e%2e/key",
            "/api/v1/kv/ns/a%2",
        ];
        for path in refused {
            assert!(!is_canonical(path), "{path}");
        }
    }
}
