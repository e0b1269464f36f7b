//! Partial views of JSON text: members of an object, elements of an array, both borrowed and bounded.
//!
//! A body may have tens of megabytes, so nothing is collected that the caller did not ask for.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Names the broker looks at in the body of a route, besides those of an operation.
const ROUTE_NAMES: [&str; 7] =
    ["operations", "namespace", "includeExpired", "kv", "timers", "requiredLeases", "type"];

/// Members of an operation that SQL reads.
pub(super) const OPERATION_NAMES: [&str; 16] = [
    "op",
    "ns",
    "key",
    "keys",
    "prefix",
    "after",
    "limit",
    "keysOnly",
    "value",
    "ttlSeconds",
    "forever",
    "expect",
    "required",
    "delta",
    "min",
    "max",
];

/// Members of an operation that SQL refuses, whatever they hold.
pub(super) const FORBIDDEN_NAMES: [&str; 3] = ["tenant", "tenantId", "_tenant"];

fn known(text: &str) -> Option<&'static str> {
    OPERATION_NAMES.into_iter().chain(FORBIDDEN_NAMES).chain(ROUTE_NAMES).find(|name| *name == text)
}

/// Members of an object, of those with a known name. Of a repeated name the last one stays, which is what jsonb
/// does, so the checks here and those in SQL judge the same value.
#[derive(Debug, Default)]
pub(super) struct Members<'a>(Vec<(&'static str, &'a RawValue)>);

impl<'a> Members<'a> {
    /// Reads an object; `None` when `raw` is none, or has a name that is no Unicode text.
    pub(super) fn of(raw: &'a RawValue) -> Option<Self> {
        serde_json::from_str(raw.get()).ok()
    }

    /// The member `name`, which must be a known one.
    pub(super) fn get(&self, name: &str) -> Option<&'a RawValue> {
        debug_assert!(known(name).is_some(), "{name} is never collected");
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn set(&mut self, name: &'static str, value: &'a RawValue) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some(member) => member.1 = value,
            None => self.0.push((name, value)),
        }
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Members::default();
                while let Some(Name(name)) = map.next_key()? {
                    match name {
                        Some(name) => members.set(name, map.next_value()?),
                        None => _ = map.next_value::<IgnoredAny>()?,
                    }
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A member name after decoding, if it is a known one.
struct Name(Option<&'static str>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a member name")
            }

            fn visit_str<E>(self, text: &str) -> Result<Name, E> {
                Ok(Name(known(text)))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// The first elements of an array, and how many there are in all.
#[derive(Debug)]
pub(super) struct Elements<'a> {
    /// At most as many as asked for.
    pub(super) kept: Vec<&'a RawValue>,
    /// All elements, kept or not.
    pub(super) count: usize,
}

impl<'a> Elements<'a> {
    /// Reads an array, keeping at most `limit` elements; `None` when `raw` is none.
    pub(super) fn of(raw: &'a RawValue, limit: usize) -> Option<Self> {
        struct Array(usize);
        impl<'de> Visitor<'de> for Array {
            type Value = Elements<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut kept = Vec::new();
                while kept.len() < self.0 {
                    match seq.next_element()? {
                        Some(element) => kept.push(element),
                        None => {
                            return Ok(Elements { count: kept.len(), kept });
                        }
                    }
                }
                let mut count = kept.len();
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Elements { kept, count })
            }
        }
        impl<'de> DeserializeSeed<'de> for Array {
            type Value = Elements<'de>;

            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
                deserializer.deserialize_seq(self)
            }
        }
        // `raw` was read as one JSON text before, so nothing can follow the array.
        Array(limit).deserialize(&mut serde_json::Deserializer::from_str(raw.get())).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_objects() {
        for (text, value) in [
            (r#"{"a":1,"value":2,"b":[{"value":3}]}"#, Some(Some("2"))),
            (r#"{"value":1,"v\u0061lue": {"x":1.50} }"#, Some(Some(r#"{"x":1.50}"#))),
            (r#"{"value":null}"#, Some(Some("null"))),
            ("{}", Some(None)),
            (r#"{"\ud800":1}"#, None),
            ("[]", None),
            ("null", None),
        ] {
            let raw = serde_json::from_str(text).unwrap();
            let found = Members::of(raw).map(|members| members.get("value").map(RawValue::get));
            assert_eq!(found, value, "{text}");
        }
    }

    #[test]
    fn elements_of_arrays() {
        for (text, limit, expected) in [
            ("[]", 2, Some((0, 0))),
            ("[1, 2]", 2, Some((2, 2))),
            ("[1,[2,3],{},4]", 2, Some((2, 4))),
            ("[1]", 0, Some((0, 1))),
            ("{}", 2, None),
            ("1", 2, None),
        ] {
            let raw = serde_json::from_str(text).unwrap();
            let found = Elements::of(raw, limit).map(|elements| (elements.kept.len(), elements.count));
            assert_eq!(found, expected, "{text}");
        }
    }
}
