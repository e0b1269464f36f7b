//! What a body that both reads and adds does: batches of KV or timer operations, and cycles of
//! streams (proxy contract §10).

use serde_json::value::RawValue;

/// What the proxy needs to know of one operation; everything else stays unread.
#[derive(Default)]
struct Operation<'b> {
    op: Option<&'b RawValue>,
    ns: Option<&'b RawValue>,
    key: Option<&'b RawValue>,
    keys: Option<&'b RawValue>,
    prefix: Option<&'b RawValue>,
}

/// A batch as the cell will read it.
pub struct Batch {
    /// At least one operation may add to what the tenant keeps.
    pub growing: bool,
    /// Every operation is bookkeeping of the Kafka or S3 facade, which counts as consuming.
    pub facade_bookkeeping: bool,
}

impl Batch {
    /// Reads a body: an array, or an object with `operations`. `None` when it is neither, or when
    /// an element is no object: the proxy then cannot tell what the cell would do.
    ///
    /// Where a member is repeated the last one counts, as in the cell.
    pub fn read(body: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(body).ok()?;
        let mut elements = Vec::new();
        match text.trim_start().as_bytes().first()? {
            b'[' => elements = serde_json::from_str::<Vec<&RawValue>>(text).ok()?,
            b'{' => {
                for (name, value) in members(text)? {
                    if name == "operations" {
                        elements = serde_json::from_str(value.get()).ok()?;
                    }
                }
            }
            _ => return None,
        }
        let mut batch = Self { growing: false, facade_bookkeeping: !elements.is_empty() };
        for element in elements {
            let op = Operation::read(element.get())?;
            batch.growing |= op.grows();
            batch.facade_bookkeeping &= op.is_facade_bookkeeping();
        }
        Some(batch)
    }
}

/// Whether a streams cycle puts messages in: `push_items` is an array that is not empty. `None` when
/// the body cannot be read. Where the member is repeated the last one counts.
pub fn cycle_pushes(body: &[u8]) -> Option<bool> {
    let members = members(std::str::from_utf8(body).ok()?)?;
    let Some((_, items)) = members.iter().rev().find(|(name, _)| name == "push_items") else {
        return Some(false);
    };
    // Not an array: nothing that the broker could push.
    Some(serde_json::from_str::<Vec<&RawValue>>(items.get()).is_ok_and(|items| !items.is_empty()))
}

impl<'b> Operation<'b> {
    fn read(text: &'b str) -> Option<Self> {
        let mut op = Operation::default();
        for (name, value) in members(text)? {
            match name.as_str() {
                "op" => op.op = Some(value),
                "ns" => op.ns = Some(value),
                "key" => op.key = Some(value),
                "keys" => op.keys = Some(value),
                "prefix" => op.prefix = Some(value),
                _ => {}
            }
        }
        Some(op)
    }

    /// Whatever is not known to read or remove counts as growing.
    fn grows(&self) -> bool {
        let name = self.op.and_then(string);
        !matches!(name.as_deref(), Some("get" | "getMany" | "getPrefix" | "delete" | "cancel"))
    }

    fn is_facade_bookkeeping(&self) -> bool {
        let (Some(name), Some(ns)) = (self.op.and_then(string), self.ns.and_then(string)) else {
            return false;
        };
        let (mark, allowed): (&str, &[&str]) = match ns.as_str() {
            "queen-kafka" => ("qk:", &["put", "delete", "getMany", "getPrefix"]),
            "queen-s3" => ("s3:", &["get", "getMany", "getPrefix", "put", "putIfAbsent", "delete"]),
            _ => return false,
        };
        allowed.contains(&name.as_str()) && self.names_all_start_with(mark)
    }

    /// At least one name is given, and every one given starts with the mark.
    fn names_all_start_with(&self, mark: &str) -> bool {
        let mut names = Vec::new();
        for single in [self.key, self.prefix].into_iter().flatten() {
            names.push(string(single));
        }
        if let Some(keys) = self.keys {
            match serde_json::from_str::<Vec<String>>(keys.get()) {
                Ok(keys) if !keys.is_empty() => names.extend(keys.into_iter().map(Some)),
                _ => return false,
            }
        }
        !names.is_empty()
            && names.iter().all(|name| name.as_deref().is_some_and(|name| name.starts_with(mark)))
    }
}

/// The members of an object in the order they stand, repeated ones included; `None` for anything
/// that is no object.
fn members(text: &str) -> Option<Vec<(String, &RawValue)>> {
    struct Members;
    impl<'de> serde::de::Visitor<'de> for Members {
        type Value = Vec<(String, &'de RawValue)>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let members = serde::Deserializer::deserialize_map(&mut reader, Members).ok()?;
    reader.end().ok()?;
    Some(members)
}

fn string(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::{Batch, cycle_pushes};

    #[test]
    fn growing_batches() {
        // body, growing (None: cannot be read)
        let cases: &[(&str, Option<bool>)] = &[
            ("[]", Some(false)),
            (r#"{"operations":[]}"#, Some(false)),
            (r#"[{"op":"get"}]"#, Some(false)),
            (r#"[{"op":"getMany"},{"op":"getPrefix"},{"op":"delete"},{"op":"cancel"}]"#, Some(false)),
            (r#"[{"op":"get"},{"op":"put"}]"#, Some(true)),
            (r#"{"operations":[{"op":"incr"}]}"#, Some(true)),
            (r#"{"operations":[{"op":"putIfAbsent"}]}"#, Some(true)),
            (r"[{}]", Some(true)),
            (r#"[{"op":null}]"#, Some(true)),
            (r#"[{"op":7}]"#, Some(true)),
            (r#"[{"op":"GET"}]"#, Some(true)),
            (r#"[{"op":"g\u0065t"}]"#, Some(false)),
            // the last one counts, as in the cell
            (r#"[{"op":"get","op":"put"}]"#, Some(true)),
            (r#"[{"op":"put","op":"get"}]"#, Some(false)),
            (r#"[{"\u006fp":"put"}]"#, Some(true)),
            (r#"{"operations":[],"operations":[{"op":"put"}]}"#, Some(true)),
            (r#"{"operations":[{"op":"put"}],"operations":[]}"#, Some(false)),
            (r#"{"other":[{"op":"put"}]}"#, Some(false)),
            (r#"[{"op":"get","value":{"op":"put"}}]"#, Some(false)),
            ("", None),
            ("   ", None),
            ("null", None),
            ("7", None),
            (r"[7]", None),
            (r#"[{"op":"get"}"#, None),
            (r#"[{"op":"get"}] x"#, None),
            (r#"{"operations":7}"#, None),
            (r#"{"operations":null}"#, None),
        ];
        for (body, want) in cases {
            assert_eq!(Batch::read(body.as_bytes()).map(|b| b.growing), *want, "{body}");
        }
        assert!(Batch::read(b"[{\"op\":\"\xff\"}]").is_none());
    }

    #[test]
    fn cycles_that_push() {
        let cases: &[(&str, Option<bool>)] = &[
            (r#"{"push_items":[{}]}"#, Some(true)),
            (r#"{"push_items":[]}"#, Some(false)),
            (r#"{"push_items":null}"#, Some(false)),
            (r#"{"acks":[1]}"#, Some(false)),
            ("{}", Some(false)),
            (r#"{"push_items":[],"push_items":[1]}"#, Some(true)),
            (r#"{"push\u005fitems":[1]}"#, Some(true)),
            ("[]", None),
            ("", None),
            (r#"{"push_items":[1]"#, None),
        ];
        for (body, want) in cases {
            assert_eq!(cycle_pushes(body.as_bytes()), *want, "{body}");
        }
    }

    #[test]
    fn facade_bookkeeping_is_told_by_namespace_operation_and_every_name() {
        let cases: &[(&str, bool)] = &[
            (r#"[{"op":"put","ns":"queen-kafka","key":"qk:g"}]"#, true),
            (r#"[{"op":"getMany","ns":"queen-kafka","keys":["qk:a","qk:b"]}]"#, true),
            (r#"[{"op":"getPrefix","ns":"queen-kafka","prefix":"qk:"}]"#, true),
            (r#"[{"op":"putIfAbsent","ns":"queen-s3","key":"s3:o"}]"#, true),
            (
                r#"[{"op":"get","ns":"queen-s3","key":"s3:o"},{"op":"put","ns":"queen-kafka","key":"qk:g"}]"#,
                true,
            ),
            ("[]", false),
            (r#"[{"op":"get","ns":"queen-kafka","key":"qk:g"}]"#, false),
            (r#"[{"op":"incr","ns":"queen-s3","key":"s3:o"}]"#, false),
            (r#"[{"op":"put","ns":"queen-kafka","key":"other"}]"#, false),
            (r#"[{"op":"put","ns":"queen-kafka"}]"#, false),
            (r#"[{"op":"put","ns":"other","key":"qk:g"}]"#, false),
            (r#"[{"op":"getMany","ns":"queen-kafka","keys":[]}]"#, false),
            (r#"[{"op":"getMany","ns":"queen-kafka","keys":["qk:a",7]}]"#, false),
            (r#"[{"op":"getMany","ns":"queen-kafka","keys":["qk:a"],"key":"x"}]"#, false),
            (r#"[{"op":"put","ns":"queen-kafka","key":"qk:g"},{"op":"put","ns":"mine","key":"k"}]"#, false),
            (r#"[{"op":"put","ns":"queen-kafka","key":"qk:g","key":"mine"}]"#, false),
        ];
        for (body, want) in cases {
            assert_eq!(Batch::read(body.as_bytes()).unwrap().facade_bookkeeping, *want, "{body}");
        }
    }
}
