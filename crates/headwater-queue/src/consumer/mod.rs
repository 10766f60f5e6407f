//! Consumers: who works on which partition, and how messages are handled.
//!
//! Upstream: applications subscribe. Downstream: the backend.

// In dependency order: each module uses only those above it.
mod seam;
