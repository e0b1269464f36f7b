//! The KV broker of one cell: HTTP routes over `queen.kv` (KV contract, sections 1 to 7).
//!
//! A call walks one way: `server` accepts it, `routes` names it, `access` and `tenant` say whose it is,
//! `request` turns it into the text of an operation array, `gate` lets it in, `store` hands that text to the one
//! SQL entry over a connection of `pool`, together with others by way of `lanes`. Beside that, `control` listens for switches and quotas, and `sweeper`
//! removes and measures, on connections of their own (`line`).
//! Values and numbers are never decoded on the way: they pass as JSON text in both directions.

mod access;
mod answers;
mod body;
mod clock;
mod config;
mod console;
mod control;
mod demand;
mod errors;
mod gate;
mod json;
mod ladder;
mod lanes;
mod latch;
mod line;
mod members;
mod metrics;
mod pool;
mod recent;
mod request;
mod routes;
mod schema;
mod server;
mod store;
mod sweeper;
mod switches;
mod system;
mod tally;
mod tenant;
mod transaction;

pub use config::CellConfig;
pub use errors::CellError;
pub use ladder::{LadderSettings, Rate};
pub use schema::CELL_SQL;
pub use server::{BoundCell, serve};
pub use sweeper::SweeperSettings;
