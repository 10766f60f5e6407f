#![doc = include_str!("../README.md")]

mod wait;

mod random;

mod ports;

mod temp_server_dir;

mod package;

mod process;

mod shared;

mod resp;

mod tls;

mod redis;

mod cluster;

mod sentinel;

mod postgres;

mod proxy;

mod child;

mod wall_clock;

pub mod bench;

pub use child::Child;
pub use cluster::{Cluster, ClusterBuilder};
pub use package::package_folder;
pub use ports::Port;
pub use postgres::{Database, Postgres};
pub use process::is_alive;
pub use proxy::Proxy;
pub use random::{TestRandom, unique};
pub use redis::{Persistence, Redis, RedisBuilder};
pub use resp::{RedisConnection, RedisReply};
pub use sentinel::Sentinel;
pub use wait::wait_until;
pub use wall_clock::WallClock;
