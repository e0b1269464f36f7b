//! The three answers of a look-up in the control plane.

use std::sync::Arc;

/// What the control plane says about a name.
#[derive(Debug)]
pub enum Lookup<V> {
    /// It exists; this is its newest known state.
    Found(Arc<V>),
    /// The database answered that there is no such thing. Only this may deny and be remembered.
    Absent,
    /// The database did not answer. Only this may be bridged by an older answer.
    Unavailable,
}

impl<V> Clone for Lookup<V> {
    fn clone(&self) -> Self {
        match self {
            Self::Found(value) => Self::Found(Arc::clone(value)),
            Self::Absent => Self::Absent,
            Self::Unavailable => Self::Unavailable,
        }
    }
}
