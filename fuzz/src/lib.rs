//! The pure rooms alone, compiled from the sources of the project: a target builds in seconds, without
//! Pingora and the database.

// Of these rooms some parts are for others only.
#![allow(dead_code)]

#[path = "../../src/domain/mod.rs"]
pub mod domain;
#[path = "../../src/policy/inspect/naive.rs"]
pub mod naive;
#[path = "../../src/policy/mod.rs"]
pub mod policy;

pub use policy::inspect::{Messages, Unreadable};

use naive::Kind;

/// Inspects, and compares with the plain parser where that takes the body.
pub fn compare<'b>(
    body: &'b [u8],
    kind: Kind,
    read: impl Fn(&'b [u8], usize) -> Result<Messages<'b>, Unreadable>,
) {
    let told = read(body, 64);
    if let Ok(told) = &told {
        assert!(told.pairs.list().len() <= 64);
        assert!(told.payload_bytes <= body.len() as u64);
        assert_eq!(told.count == 0, told.heaviest.is_none());
    }
    if let Some(naive) = naive::read(body, kind) {
        naive.assert_covered_by(&told.expect("what serde_json reads is readable"));
    }
}
