//! What is agreed on about the life of sessions.

/// Longest life of a session, in seconds: none is minted or believed that ends later. A revocation whose
/// token's end is not known is held for as long.
pub const LONGEST_SESSION_S: u64 = 30 * 24 * 3600;
