//! Places of waiting pops over three proxies.
