//! How members share topics, on every backend: with listeners that record their calls.

#[macro_use]
mod fixture;

mod leaving;
mod many;
mod outages;
mod processes;
mod shared;
mod sharing;
mod static_members;
mod topics;
