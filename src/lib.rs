//! The multi-tenant front door for Queen: a reverse proxy on Pingora, its control plane in
//! PostgreSQL, and the key/value cell behind it.
//!
//! Rooms, from the outside in; each may use those after it: [`gateway`], [`portal`], [`metering`],
//! [`reconcile`], [`identity`], [`control`], [`limits`], [`policy`], [`domain`]. [`cell`] is the other program and shares only
//! [`telemetry`] and [`domain::secret`] with the proxy. See `ARCHITECTURE.md`.

pub mod admin;
pub mod cell;
pub mod config;
pub mod control;
pub mod dev;
pub mod domain;
pub mod figures;
pub mod gateway;
pub mod identity;
pub mod limits;
pub mod metering;
pub mod ops;
pub mod policy;
pub mod portal;
pub mod process;
pub mod proxy;
pub mod reconcile;
pub mod reload;
pub mod telemetry;
