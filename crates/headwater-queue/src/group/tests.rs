//! How members share topics, on every backend: with workplaces that only write down what they are told.

#[macro_use]
mod place;

mod leaving;
mod many;
mod outages;
mod processes;
mod shared;
mod sharing;
mod static_members;
mod topics;
