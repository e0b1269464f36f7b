//! What an operator sees from outside.

pub mod log;
