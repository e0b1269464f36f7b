//! A plan's limits and a cluster's overrides of them (proxy contract §3).

use serde_json::Value;

/// A cap: a number, or none. Zero denies, it never means unlimited (D8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cap {
    /// No cap.
    Unlimited,
    /// At most this many. Negative overrides are kept as the contract accepts them; they deny.
    At(i64),
}

impl From<Option<i64>> for Cap {
    /// How the plan's columns store it: NULL is unlimited.
    fn from(column: Option<i64>) -> Self {
        column.map_or(Self::Unlimited, Self::At)
    }
}

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// The twelve numbers of a plan, each named as its column.
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct Limits {
            $($(#[$doc])* pub $name: Cap,)+
        }

        impl Limits {
            /// The column names, in the order of `plans`.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            /// Builds the set by asking `column` for each name.
            pub fn from_columns<E>(mut column: impl FnMut(&str) -> Result<Cap, E>) -> Result<Self, E> {
                Ok(Self { $($name: column(stringify!($name))?,)+ })
            }

            /// The plan's numbers with a cluster's `limit_overrides` laid over them.
            #[must_use]
            pub fn with_overrides(self, document: &Value) -> Self {
                Self { $($name: overridden(self.$name, document.get(stringify!($name))),)+ }
            }

            /// Each name with its value.
            pub fn entries(&self) -> Vec<(&'static str, Cap)> {
                vec![$((stringify!($name), self.$name)),+]
            }
        }
    };
}

limits! {
    /// Requests per second.
    max_req_per_sec,
    /// Requests that may come at once.
    req_burst,
    /// Messages per second.
    max_msgs_per_sec,
    /// Messages that may come at once.
    msgs_burst,
    /// Queues of the cluster.
    max_queues,
    /// Partitions of one queue.
    max_partitions_per_queue,
    /// Long polls waiting at once.
    max_parked_pops,
    /// Bytes of one payload.
    max_payload_bytes,
    /// Items of one push.
    max_batch_items,
    /// Bytes kept in the cell.
    max_retained_bytes,
    /// Seconds a message may be kept.
    max_retention_seconds,
    /// Messages in a calendar month (UTC).
    monthly_msgs_quota,
}

/// Absent keeps the plan's value, JSON null lifts the cap, an integer of 64 bits replaces it, and
/// anything else is ignored: a malformed override must not become a silent zero.
fn overridden(plan: Cap, document: Option<&Value>) -> Cap {
    match document {
        Some(Value::Null) => Cap::Unlimited,
        Some(Value::Number(number)) => number.as_i64().map_or(plan, Cap::At),
        _ => plan,
    }
}

#[cfg(test)]
mod tests {
    use super::{Cap, Limits};

    #[test]
    fn every_row_of_the_override_table() {
        let cases: &[(&str, Cap)] = &[
            (r"{}", Cap::At(7)),
            (r#"{"NAME": null}"#, Cap::Unlimited),
            (r#"{"NAME": 500}"#, Cap::At(500)),
            (r#"{"NAME": 0}"#, Cap::At(0)),
            (r#"{"NAME": -3}"#, Cap::At(-3)),
            (r#"{"NAME": 9223372036854775807}"#, Cap::At(i64::MAX)),
            (r#"{"NAME": 9223372036854775808}"#, Cap::At(7)),
            (r#"{"NAME": 1.5}"#, Cap::At(7)),
            (r#"{"NAME": "500"}"#, Cap::At(7)),
            (r#"{"NAME": true}"#, Cap::At(7)),
            (r#"{"NAME": [1]}"#, Cap::At(7)),
            (r#"{"NAME": {}}"#, Cap::At(7)),
            (r#"{"other": 500}"#, Cap::At(7)),
            (r"[1, 2]", Cap::At(7)),
            (r"null", Cap::At(7)),
            (r#""text""#, Cap::At(7)),
        ];
        let plan = Limits::from_columns(|_| Ok::<_, ()>(Cap::At(7))).unwrap();
        for name in Limits::NAMES {
            for (document, want) in cases {
                let document = serde_json::from_str(&document.replace("NAME", name)).unwrap();
                let merged = plan.clone().with_overrides(&document);
                for (other, cap) in merged.entries() {
                    let want = if other == *name { *want } else { Cap::At(7) };
                    assert_eq!(cap, want, "{other} under {document}");
                }
            }
        }
    }

    #[test]
    fn a_null_column_is_unlimited() {
        assert_eq!(Cap::from(None), Cap::Unlimited);
        assert_eq!(Cap::from(Some(3)), Cap::At(3));
    }
}
