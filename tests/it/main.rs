//! Tests against real servers, named after the situation they prove. One binary: see Cargo.toml.

// A test says what went wrong by panicking, and its futures may be large.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::large_futures)]

mod support;

mod admin_commands;
mod balancers;
mod caps;
mod cell_operations;
mod cells;
mod changes;
mod clients;
mod configuration;
mod control_functions;
mod corpus;
mod dev_command;
mod examples;
mod front_door;
mod hostile_requests;
mod isolation;
mod kv_console;
mod kv_errors;
mod kv_linearizability;
mod kv_model;
mod kv_races;
mod kv_tables;
mod kv_transaction;
mod kv_vectors;
mod login;
mod metered;
mod metering;
mod outages;
mod published_clients;
mod real_brokers;
mod reconciling;
mod reloading;
mod sessions;
mod shared_limits;
mod sign_in_attacks;
#[cfg(feature = "opentelemetry")]
mod spans;
mod tls;
mod watching;
