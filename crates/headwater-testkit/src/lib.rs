//! Starts real servers for tests.
