//! Tests against real servers, named after the situation they prove. One binary: see Cargo.toml.

mod support;

mod configuration;
mod control_functions;
mod front_door;
mod kv_vectors;
mod published_clients;
