//! A store that dies, hangs and comes back.
