//! Tests against real servers, named after the situation they prove. One binary: see Cargo.toml.

mod support;

mod cells;
mod changes;
mod configuration;
mod control_functions;
mod dev_command;
mod front_door;
mod hostile_requests;
mod isolation;
mod kv_vectors;
mod outages;
mod published_clients;
