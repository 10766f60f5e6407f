//! Streams on Redis.

use std::sync::Arc;

use crate::{Backend, Options, Result};

pub(crate) async fn open(_url: &str, _options: &Options) -> Result<Arc<dyn Backend>> {
    todo!()
}
