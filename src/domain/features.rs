//! Features a plan can hold (proxy contract §3, D2).

use serde_json::Value;

/// What a gated route needs from the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feature {
    /// `/streams/…`
    Streams,
    /// `POST /api/v1/traces`
    Traces,
    /// `/api/v1/kv…`
    Kv,
    /// `/api/v1/timers…`
    Timers,
    /// `/api/v1/ephemeral/…`
    Ephemeral,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Streams, Self::Traces, Self::Kv, Self::Timers, Self::Ephemeral];

    /// The key in `plans.features`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Streams => "streams",
            Self::Traces => "traces",
            Self::Kv => "kv",
            Self::Timers => "timers",
            Self::Ephemeral => "ephemeral",
        }
    }
}

/// The features a plan enables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features(u8);

impl Features {
    /// Reads `plans.features`. Only JSON `true` enables, except for `kv`, which is core traffic:
    /// there only a JSON `false` denies (D2).
    pub fn from_document(document: &Value) -> Self {
        let mut set = Self(0);
        for feature in Feature::ALL {
            let value = document.get(feature.key());
            let enabled = match feature {
                Feature::Kv => value != Some(&Value::Bool(false)),
                _ => value == Some(&Value::Bool(true)),
            };
            if enabled {
                set.0 |= 1 << feature as u8;
            }
        }
        set
    }

    /// Every feature, for a proxy without a control plane.
    pub fn all() -> Self {
        Self(u8::MAX)
    }

    /// Whether the plan holds the feature.
    pub fn contains(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u8) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::{Feature, Features};

    #[test]
    fn only_true_enables_and_only_false_denies_kv() {
        let cases: &[(&str, bool, bool)] = &[
            // document, an ordinary feature, kv
            (r"{}", false, true),
            (r#"{"NAME": true}"#, true, true),
            (r#"{"NAME": false}"#, false, false),
            (r#"{"NAME": "true"}"#, false, true),
            (r#"{"NAME": 1}"#, false, true),
            (r#"{"NAME": null}"#, false, true),
            (r"[]", false, true),
            (r"null", false, true),
        ];
        for feature in Feature::ALL {
            for (document, ordinary, kv) in cases {
                let document = document.replace("NAME", feature.key());
                let features = Features::from_document(&serde_json::from_str(&document).unwrap());
                let want = if feature == Feature::Kv { *kv } else { *ordinary };
                assert_eq!(features.contains(feature), want, "{feature:?} in {document}");
            }
        }
    }
}
