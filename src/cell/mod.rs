//! The KV broker of one cell: HTTP routes over `queen.kv` (KV contract, sections 1 to 7).
//!
//! A call walks one way: `server` accepts it, `routes` names it, `access` and `tenant` say whose it is,
//! `request` turns it into the text of an operation array, `store` hands that text to the one SQL entry.
//! Values and numbers are never decoded on the way: they pass as JSON text in both directions.

mod access;
mod answers;
mod body;
mod config;
mod console;
mod errors;
mod json;
mod members;
mod request;
mod routes;
mod schema;
mod server;
mod store;
mod tenant;
mod transaction;

pub use config::CellConfig;
pub use errors::CellError;
pub use schema::CELL_SQL;
pub use server::{BoundCell, serve};
