//! The words of the trade as types: parsed once, impossible to mix up. No I/O, no policy.

pub mod cluster;
pub mod features;
pub mod ids;
pub mod limits;
pub mod lookup;
pub mod scopes;
pub mod secret;
pub mod session;
pub mod slug;
pub mod status;
