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

mod chaos_report;

mod npm_files;

mod python;

pub mod bench;

#[cfg(feature = "browser")]
mod web_driver;

#[cfg(feature = "browser")]
mod browser;

#[cfg(feature = "browser")]
pub use browser::{Browser, BrowserScripts};
pub use chaos_report::{ChaosCounts, chaos_is_over};
pub use child::Child;
pub use cluster::{Cluster, ClusterBuilder};
pub use npm_files::NpmFile;
pub use package::package_folder;
pub use ports::Port;
pub use postgres::{Database, Postgres};
pub use process::is_alive;
pub use proxy::Proxy;
pub use python::python_with_redis;
pub use random::{TestRandom, unique};
pub use redis::{Persistence, Redis, RedisBuilder};
pub use resp::{RedisConnection, RedisReply};
pub use sentinel::Sentinel;
pub use wait::wait_until;
pub use wall_clock::WallClock;
#[cfg(feature = "browser")]
pub use web_driver::{WebDriver, WebElement};
