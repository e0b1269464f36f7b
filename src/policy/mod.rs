//! Pure decisions: no I/O, no async, no clock. Each rule is a function over domain types with its
//! table of cases beside it.

pub mod authorize;
pub mod batch;
pub mod host;
pub mod inspect;
pub mod path;
pub mod route;
