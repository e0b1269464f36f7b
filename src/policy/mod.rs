//! Pure decisions: no I/O, no async, no clock. Each rule is a function over domain types with its
//! table of cases beside it.

pub mod authorize;
pub mod host;
pub mod kv_batch;
pub mod path;
pub mod route;
