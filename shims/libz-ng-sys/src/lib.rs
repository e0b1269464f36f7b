//! The names of `libz-ng-sys`, from `libz-sys` built with the C compiler alone.
#![no_std]
pub use libz_sys::*;
