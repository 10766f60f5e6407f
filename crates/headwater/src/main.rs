//! `headwater`: the binary. For now it shows the stream substrate at work.

fn main() {}
