//! Clusters, hosts and keys, by number.

pub fn slug(number: usize) -> String {
    format!("tenant-{number:05}-prod")
}

pub fn host(number: usize) -> String {
    format!("{}.eu1.queen.example", slug(number))
}

pub fn key(number: usize) -> String {
    format!("qk_live_{number:043}")
}
