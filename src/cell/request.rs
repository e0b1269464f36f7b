//! From a request to the text of an operation array (KV contract, sections 6.3 and 6.4).
//!
//! What an operation may hold is decided in SQL. Here only the shape of the request and the three limits
//! that must be known before a connection is taken are looked at. Values stay the text they came as.

use serde_json::value::RawValue;

use super::config::CellConfig;
use super::demand::Demand;
use super::errors::KvError;
use super::json::compact_len;
use super::members::{Elements, FORBIDDEN_NAMES, Members, OPERATION_NAMES};

/// Digits of a counter's `delta`, `min` and `max`, written out. PostgreSQL would take 131072, and a
/// short exponent makes them: such counters would pass every size limit.
const MAX_NUMBER: usize = 4096;
/// Bytes of any other member but `value` and `keys`. A key of 512 bytes has 3074 at most, all escapes.
const MAX_MEMBER: usize = 8192;
/// Bytes of `keys`: as many as a call may have, each at its longest.
const MAX_KEYS: usize = 4096 * MAX_MEMBER;

/// Limits enforced before a connection is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct EdgeLimits {
    ops: usize,
    keys: usize,
    value_bytes: usize,
}

impl From<&CellConfig> for EdgeLimits {
    fn from(config: &CellConfig) -> Self {
        Self {
            ops: config.kv_max_ops_per_call,
            keys: config.kv_max_keys_per_call,
            value_bytes: config.kv_max_value_bytes,
        }
    }
}

impl EdgeLimits {
    /// These limits, and no more operations and keys than given.
    pub(super) fn at_most(self, ops: usize, keys: usize) -> Self {
        Self { ops: self.ops.min(ops), keys: self.keys.min(keys), ..self }
    }
}

/// Operations of a call as JSON text, within the limits of the edge.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Call {
    text: String,
    operations: usize,
    demand: Demand,
}

impl Call {
    /// Checks operations against the limits and writes them anew.
    pub(super) fn of(operations: &Elements<'_>, limits: EdgeLimits) -> Result<Self, KvError> {
        let (operations, demand) = check(operations, limits)?;
        Ok(Self { text: rebuild(&operations), operations: operations.len(), demand })
    }

    /// What it asks for; nothing when asked again.
    pub(super) fn take_demand(&mut self) -> Demand {
        std::mem::take(&mut self.demand)
    }

    /// A call of one operation, from its text, whose demand was already taken.
    pub(super) fn one(text: String) -> Self {
        Self { text, operations: 1, demand: Demand::default() }
    }

    /// How many operations it has.
    pub(super) fn operations(&self) -> usize {
        self.operations
    }

    /// The JSON array for SQL.
    pub(super) fn into_text(self) -> String {
        self.text
    }
}

/// Reads the body of the batch route: an array, or an object with the array under `operations`.
/// `None` means there is nothing to do.
pub(super) fn batch(body: &[u8], limits: EdgeLimits) -> Result<Option<Call>, KvError> {
    const SHAPE: KvError =
        KvError::bad("kv_bad_body", "an array of operations, or an object with it under \"operations\"");
    let body = parse(body)?;
    let array = match body.get().as_bytes().first() {
        Some(b'[') => body,
        Some(b'{') => Members::of(body).and_then(|body| body.get("operations")).ok_or(SHAPE)?,
        _ => return Err(SHAPE),
    };
    let operations = Elements::of(array, limits.ops).ok_or(SHAPE)?;
    if operations.count == 0 {
        return Ok(None);
    }
    Call::of(&operations, limits).map(Some)
}

/// Writes the operations anew with the members that SQL reads: what nobody reads would cost memory
/// there all the same. Anything but an object becomes a number, which SQL refuses with its position.
fn rebuild(operations: &[Option<Members<'_>>]) -> String {
    let mut text = String::from("[");
    for operation in operations {
        if text.len() > 1 {
            text.push(',');
        }
        let Some(members) = operation else {
            text.push('0');
            continue;
        };
        text.push('{');
        let mut separator = "\"";
        for name in OPERATION_NAMES {
            if let Some(value) = members.get(name) {
                text.extend([separator, name, "\":", value.get()]);
                separator = ",\"";
            }
        }
        for name in FORBIDDEN_NAMES {
            if members.get(name).is_some() {
                text.extend([separator, name, "\":null"]);
                separator = ",\"";
            }
        }
        text.push('}');
    }
    text.push(']');
    text
}

/// One `get` of a path route.
pub(super) fn get(namespace: &str, key: &str) -> Result<Call, KvError> {
    single("get", namespace, key, &[], 0)
}

/// One `put` of a path route. Members that are no option of a put are dropped, those that would contradict
/// the path are refused.
pub(super) fn put(namespace: &str, key: &str, body: &[u8], limits: EdgeLimits) -> Result<Call, KvError> {
    let members = options(parse(body)?)?;
    let options = select(&members, &["value", "ttlSeconds", "forever", "expect", "required"]);
    let value_bytes = check_sizes(&members, limits)?;
    single("put", namespace, key, &options, value_bytes)
}

/// One `delete` of a path route; no body and `null` mean no options.
pub(super) fn delete(namespace: &str, key: &str, body: &[u8], limits: EdgeLimits) -> Result<Call, KvError> {
    if body.trim_ascii().is_empty() {
        return single("delete", namespace, key, &[], 0);
    }
    let body = parse(body)?;
    if body.get() == "null" {
        return single("delete", namespace, key, &[], 0);
    }
    let members = options(body)?;
    check_sizes(&members, limits)?;
    single("delete", namespace, key, &select(&members, &["expect", "required"]), 0)
}

fn parse(body: &[u8]) -> Result<&RawValue, KvError> {
    serde_json::from_slice(body).map_err(|_| KvError::bad("kv_bad_body", "the body is not JSON"))
}

/// Members of the body of a path route, none of which may repeat what the path says.
fn options(body: &RawValue) -> Result<Members<'_>, KvError> {
    const SHAPE: KvError = KvError::bad("kv_bad_body", "the body of this route is an object");
    let members = Members::of(body).ok_or(SHAPE)?;
    if ["op", "ns", "namespace", "key"].iter().any(|name| members.get(name).is_some()) {
        return Err(KvError::bad("kv_field_in_path", "op, ns, namespace and key come from the path alone"));
    }
    Ok(members)
}

fn select<'a>(members: &Members<'a>, names: &[&'static str]) -> Vec<(&'static str, &'a RawValue)> {
    names.iter().filter_map(|name| Some((*name, members.get(name)?))).collect()
}

fn single(
    op: &str,
    namespace: &str,
    key: &str,
    options: &[(&str, &RawValue)],
    value_bytes: usize,
) -> Result<Call, KvError> {
    // Text always serialises; the error arm only spares a panic.
    let quote = |text: &str| serde_json::to_string(text).map_err(|_| KvError::failed("kv_result_unreadable"));
    let mut text = format!(r#"[{{"op":"{op}","ns":{},"key":{}"#, quote(namespace)?, quote(key)?);
    for (name, value) in options {
        text.extend([",\"", name, "\":", value.get()]);
    }
    text.push_str("}]");
    let mut demand = Demand::default();
    demand.add(op, value_bytes, options.iter().any(|(name, _)| *name == "expect"));
    Ok(Call { text, operations: 1, demand })
}

/// The checks of section 6.4, in its order: operations, keys, sizes. Returns the members of each operation
/// that is an object, and what all of them ask for.
fn check<'a>(
    operations: &Elements<'a>,
    limits: EdgeLimits,
) -> Result<(Vec<Option<Members<'a>>>, Demand), KvError> {
    const UNREADABLE: KvError = KvError::bad("kv_bad_body", "a member name is not Unicode text");
    if operations.count > limits.ops {
        let detail = format!("{} operations, at most {}", operations.count, limits.ops);
        return Err(KvError::Bad { reason: "kv_too_many_ops".into(), detail: Some(detail.into()) });
    }
    let mut keys = 0;
    let (mut names, mut checked) = (Vec::new(), Vec::with_capacity(operations.kept.len()));
    for operation in &operations.kept {
        if !operation.get().starts_with('{') {
            checked.push(None);
            continue;
        }
        let members = Members::of(operation).ok_or(UNREADABLE)?;
        let name = operation_name(&members);
        keys += key_count(&name, &members);
        names.push(name);
        checked.push(Some(members));
    }
    if keys > limits.keys {
        let detail = format!("{keys} keys, at most {}", limits.keys);
        return Err(KvError::Bad { reason: "kv_too_many_keys".into(), detail: Some(detail.into()) });
    }
    let mut demand = Demand::default();
    for (name, members) in names.iter().zip(checked.iter().flatten()) {
        demand.add(name, check_sizes(members, limits)?, members.get("expect").is_some());
    }
    Ok((checked, demand))
}

/// Bounds every member that goes to SQL: the value by its own limit, and the others by what the longest
/// legal one needs, so that junk in them is not parsed there into many times its size. Returns the size of
/// the value, 0 without one.
fn check_sizes(members: &Members<'_>, limits: EdgeLimits) -> Result<usize, KvError> {
    let value_bytes = members.get("value").map_or(Ok(0), |value| check_value(value, limits))?;
    for name in OPERATION_NAMES {
        let Some(member) = members.get(name) else { continue };
        let (size, most) = match name {
            "value" => continue,
            "keys" => (member.get().len(), MAX_KEYS),
            // By its digits: an exponent is short.
            "delta" | "min" | "max" => (compact_len(member.get()), MAX_NUMBER),
            _ => (member.get().len(), MAX_MEMBER),
        };
        if size > most {
            let detail = format!("{name} is longer than any that could be meant");
            return Err(match name {
                "key" | "prefix" => {
                    KvError::TooLarge { reason: "kv_key_too_large".into(), detail: Some(detail) }
                }
                _ => KvError::Bad { reason: "kv_bad_request".into(), detail: Some(detail.into()) },
            });
        }
    }
    Ok(value_bytes)
}

fn check_value(value: &RawValue, limits: EdgeLimits) -> Result<usize, KvError> {
    let size = compact_len(value.get());
    if size > limits.value_bytes {
        let detail = format!("{size} bytes, at most {}", limits.value_bytes);
        return Err(KvError::TooLarge { reason: "kv_value_too_large".into(), detail: Some(detail) });
    }
    Ok(size)
}

/// Name of an operation; empty when it has none.
fn operation_name(operation: &Members<'_>) -> String {
    operation.get("op").and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
}

/// How many keys an operation counts for (section 3.2).
fn key_count(name: &str, operation: &Members<'_>) -> usize {
    match name {
        "getMany" => operation.get("keys").and_then(|raw| Elements::of(raw, 0)).map_or(0, |keys| keys.count),
        "getPrefix" => page_size(operation.get("limit")),
        _ => 1,
    }
}

/// Page size of a `getPrefix` as SQL will see it: 1..1000, 100 when not given. What SQL refuses counts as
/// not given. Doubles are exact enough, since only a whole number in the 32-bit range gets through there.
fn page_size(limit: Option<&RawValue>) -> usize {
    limit
        .and_then(|raw| raw.get().parse::<f64>().ok())
        .filter(|number| number.fract() == 0.0 && number.abs() <= 2_147_483_648.0)
        .map_or(100, |number| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "clamped to 1..=1000"
            )]
            let size = number.clamp(1.0, 1000.0) as usize;
            size
        })
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
