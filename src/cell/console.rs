//! What a console asks for: the namespaces of a tenant, and a page of one (KV contract, sections 4 and 6.4).

use serde::Deserialize;
use serde_json::value::RawValue;

use super::errors::KvError;
use super::ladder::Usage;
use super::members::Members;

/// Most namespaces in an answer; SQL stops there.
const MOST_NAMESPACES: usize = 10_000;

/// Which page of which namespace, as SQL takes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Page {
    /// Its character set is judged in SQL.
    pub(super) namespace: String,
    /// Literal start of the keys; all keys when `None`.
    pub(super) prefix: Option<String>,
    /// The page begins behind this key.
    pub(super) after: Option<String>,
    /// Rows, clamped in SQL to 1..1000; 100 when `None`.
    pub(super) limit: Option<i32>,
    /// Without values.
    pub(super) keys_only: bool,
    /// With rows that have expired and are not swept yet.
    pub(super) include_expired: bool,
}

impl Page {
    /// Reads the body of the list route. `null` counts as not given, except for the namespace.
    pub(super) fn of(body: &[u8]) -> Result<Self, KvError> {
        const SHAPE: KvError = KvError::bad(
            "kv_bad_body",
            "an object with \"namespace\" and, if wanted, prefix and after (text), limit (a whole number), \
             keysOnly and includeExpired (true or false)",
        );
        let body: &RawValue = serde_json::from_slice(body).map_err(|_| SHAPE)?;
        let members = Members::of(body).ok_or(SHAPE)?;
        let text = |name| optional::<String>(&members, name, SHAPE);
        let flag = |name| Ok(optional::<bool>(&members, name, SHAPE)?.unwrap_or(false));
        let page = Self {
            namespace: text("namespace")?.ok_or(SHAPE)?,
            prefix: text("prefix")?,
            after: text("after")?,
            limit: members
                .get("limit")
                .filter(|raw| raw.get() != "null")
                .map(|raw| saturated(raw.get()).ok_or(SHAPE))
                .transpose()?,
            keys_only: flag("keysOnly")?,
            include_expired: flag("includeExpired")?,
        };
        // PostgreSQL has no such text, and would say so in its own words.
        let texts = [Some(&page.namespace), page.prefix.as_ref(), page.after.as_ref()];
        if texts.into_iter().flatten().any(|text| text.contains('\0')) {
            return Err(KvError::bad("kv_bad_body", "a text holds \\u0000, which cannot be stored"));
        }
        Ok(page)
    }
}

fn optional<'a, T: Deserialize<'a>>(
    members: &Members<'a>,
    name: &str,
    error: KvError,
) -> Result<Option<T>, KvError> {
    let Some(raw) = members.get(name) else { return Ok(None) };
    serde_json::from_str(raw.get()).map_err(|_| error)
}

/// A whole number in the 64-bit range, however it is spelled, as the nearest one of 32 bits.
fn saturated(number: &str) -> Option<i32> {
    let wide = number.parse::<i64>().ok().or_else(|| {
        let number = number.parse::<f64>().ok()?;
        #[expect(clippy::cast_possible_truncation, reason = "whole and inside the range")]
        let wide = number as i64;
        (number.fract() == 0.0 && number.abs() < 9e18).then_some(wide)
    })?;
    let low = wide.clamp(i64::from(i32::MIN), i64::from(i32::MAX));
    i32::try_from(low).ok()
}

/// Body of the namespaces route around the array of SQL. `truncated` is there only when the array is as long
/// as it can be, for then there may be more.
pub(super) fn namespaces(array: &str) -> String {
    let truncated =
        if array.matches("\"namespace\":").count() >= MOST_NAMESPACES { ",\"truncated\":true" } else { "" };
    format!(r#"{{"namespaces":{array}{truncated}}}"#)
}

/// Body of the listing of queues, of which this cell has none, with what the tenant's keys take.
pub(super) fn queues(usage: Option<Usage>) -> String {
    usage.map_or_else(
        || r#"{"queues":[]}"#.to_owned(),
        |Usage { rows, bytes }| {
            format!(r#"{{"queues":[],"kvRows":{rows},"kvBytes":{bytes},"timerBytes":0}}"#)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages() {
        let page = |prefix: Option<&str>, after: Option<&str>, limit, keys_only, include_expired| Page {
            namespace: "n".to_owned(),
            prefix: prefix.map(ToOwned::to_owned),
            after: after.map(ToOwned::to_owned),
            limit,
            keys_only,
            include_expired,
        };
        let bare = || page(None, None, None, false, false);
        for (body, expected) in [
            (r#"{"namespace":"n"}"#, Some(bare())),
            (r#"{"namespace":"x","namespace":"n","color":[1]}"#, Some(bare())),
            (
                r#"{"namespace":"n","prefix":null,"after":null,"limit":null,"keysOnly":null,"includeExpired":null}"#,
                Some(bare()),
            ),
            (
                r#"{"namespace":"n","prefix":"","after":"é","limit":7,"keysOnly":true,"includeExpired":true}"#,
                Some(page(Some(""), Some("é"), Some(7), true, true)),
            ),
            (r#"{"namespace":"n","limit":5.0}"#, Some(page(None, None, Some(5), false, false))),
            (r#"{"namespace":"n","limit":-1e3}"#, Some(page(None, None, Some(-1000), false, false))),
            (r#"{"namespace":"n","limit":9999999999}"#, Some(page(None, None, Some(i32::MAX), false, false))),
            (
                r#"{"namespace":"n","limit":-9999999999}"#,
                Some(page(None, None, Some(i32::MIN), false, false)),
            ),
            (r#"{"namespace":"n","limit":99999999999999999999}"#, None),
            (r#"{"namespace":"n","limit":5.5}"#, None),
            (r#"{"namespace":"n","limit":"5"}"#, None),
            (r#"{"namespace":"n","limit":true}"#, None),
            (r#"{"namespace":"n","keysOnly":1}"#, None),
            (r#"{"namespace":"n","includeExpired":"true"}"#, None),
            (r#"{"namespace":"n","prefix":1}"#, None),
            (r#"{"namespace":"n","prefix":"a\u0000"}"#, None),
            (r#"{"namespace":"n","after":"\ud800"}"#, None),
            (r#"{"namespace":"n","after":{}}"#, None),
            (r#"{"namespace":null}"#, None),
            (r#"{"namespace":7}"#, None),
            ("{}", None),
            ("[]", None),
            ("null", None),
            ("", None),
            (r#"{"namespace":"n"} x"#, None),
        ] {
            assert_eq!(Page::of(body.as_bytes()).ok(), expected, "{body}");
        }
    }

    #[test]
    fn a_list_that_may_go_on_says_so() {
        let entry = r#"{"keys":1,"namespace":"n"}"#;
        let of = |count| namespaces(&format!("[{}]", vec![entry; count].join(",")));
        assert_eq!(namespaces("[]"), r#"{"namespaces":[]}"#);
        assert!(of(9_999).ends_with("]}"));
        assert!(of(10_000).ends_with(r#"],"truncated":true}"#));
    }
}
