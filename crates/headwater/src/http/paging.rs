//! Pages that are limited in bytes as well as in rows: a single row may hold a megabyte.
//!
//! Upstream: routes that list database rows. Guarantees: a page that is full in rows or bytes returns a cursor; it has
//! at least one row if there is one; at most about twice [`PAGE_BYTES_MAX`] is held in memory.

use serde::Deserialize;
use utoipa::IntoParams;

use crate::http::ApiError;

/// Maximum bytes of a page, as stored in the database. The last row may exceed it.
pub(crate) const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Rows that a list counts at most.
pub(crate) const COUNT_MAX: usize = 10_000;

/// Rows of the first read, while their size is unknown.
const FIRST_READ_ROWS: usize = 8;

/// Page selection.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// `next_cursor` of the previous page.
    pub(crate) cursor: Option<String>,
    /// Maximum number of rows: 50 by default, 500 at most.
    pub(crate) limit: Option<usize>,
}

/// Validates the requested number of rows.
pub(crate) fn limit(
    requested: Option<usize>,
    default: usize,
    max: usize,
) -> Result<usize, ApiError> {
    let limit = requested.unwrap_or(default);
    if (1..=max).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::invalid(format!("`limit` must be from 1 to {max}")))
}

/// Reads rows until a limit is reached. `read` returns up to so many rows after an id, `measure` returns the id and
/// the bytes of a row. Returns the rows, and the id of the last one if there may be more.
pub(crate) async fn read_page<T, I: Copy, E, R: Future<Output = Result<Vec<T>, E>>>(
    limit: usize,
    measure: impl Fn(&T) -> (I, usize),
    read: impl Fn(Option<I>, usize) -> R,
) -> Result<(Vec<T>, Option<I>), E> {
    let (mut rows, mut bytes, mut last): (Vec<T>, usize, Option<I>) = (Vec::new(), 0, None);
    let mut count = FIRST_READ_ROWS.min(limit);
    loop {
        let found = read(last, count).await?;
        let is_last = found.len() < count;
        for row in found {
            let (id, size) = measure(&row);
            (last, bytes) = (Some(id), bytes + size);
            rows.push(row);
            if bytes >= PAGE_BYTES_MAX {
                return Ok((rows, last));
            }
        }
        if is_last || rows.len() >= limit {
            return Ok((rows, last.filter(|_| !is_last)));
        }
        // As many rows as fit if the rest has the same average size.
        let fit = (PAGE_BYTES_MAX - bytes) / (bytes / rows.len()).max(1) + 1;
        count = fit.min(limit - rows.len());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Reads a page from rows 1 to `there` of `bytes` each. Returns the rows, whether there may be more, and the read
    /// sizes.
    async fn page(there: usize, bytes: usize, limit: usize) -> (Vec<usize>, bool, Vec<usize>) {
        let reads = RefCell::new(Vec::new());
        let read = |last: Option<usize>, count: usize| {
            reads.borrow_mut().push(count);
            let from = last.unwrap_or(0) + 1;
            std::future::ready(Ok::<_, ()>((from..=there).take(count).collect()))
        };
        let (rows, next) = read_page(limit, |row| (*row, bytes), read).await.unwrap();
        assert!(next.is_none() || next.as_ref() == rows.last());
        (rows, next.is_some(), reads.into_inner())
    }

    #[tokio::test]
    async fn a_page_ends_at_the_last_row_the_row_limit_or_the_byte_limit() {
        let (rows, is_full, reads) = page(20, 100, 500).await;
        assert_eq!((rows, is_full, reads.len()), ((1..=20).collect(), false, 2));
        let (rows, is_full, _) = page(600, 100, 500).await;
        assert_eq!((rows, is_full), ((1..=500).collect(), true));
        let (rows, is_full, _) = page(500, 100, 500).await;
        assert_eq!(
            (rows.len(), is_full),
            (500, true),
            "a full page cannot know that it is the last"
        );
        assert!(!page(0, 100, 500).await.1);

        let megabyte = 1024 * 1024;
        let (rows, is_full, reads) = page(600, megabyte, 500).await;
        assert_eq!((rows.len(), is_full), (PAGE_BYTES_MAX / megabyte, true));
        assert!(reads.iter().all(|count| *count <= 8), "{reads:?}");
        let (rows, is_full, _) = page(600, 100 * megabyte, 500).await;
        assert_eq!((rows, is_full), (vec![1], true), "a row larger than a page comes alone");
    }

    #[tokio::test]
    async fn the_read_size_adapts_to_the_row_size() {
        let (_, _, reads) = page(10_000, 64 * 1024, 500).await;
        let most = PAGE_BYTES_MAX / (64 * 1024) + 1;
        assert!(reads.iter().all(|count| *count <= most) && reads.len() <= 3, "{reads:?}");
    }
}
