#![no_main]
use queen_proxy_fuzz::{compare, naive::Kind, policy::inspect};

libfuzzer_sys::fuzz_target!(|body: &[u8]| compare(body, Kind::Push, inspect::push));
