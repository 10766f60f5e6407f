//! Pages that are bounded in bytes as well as in rows: a row may hold a megabyte, and a page hundreds of rows.
//!
//! Upstream: routes that list what lies in the database. Promises: a page that is full in rows or bytes says that there may be
//! more; it has at least one row if there is one; at most about twice [`PAGE_BYTES_MAX`] is in memory on the way.

use serde::Deserialize;
use utoipa::IntoParams;

use crate::http::ApiError;

/// Bytes of a page, as they lie in the database. The last row may reach beyond.
pub(crate) const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Rows that are read at first, when nobody knows how large they are.
const READ_FIRST: usize = 8;

/// Which page of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// `next_cursor` of the page before.
    pub(crate) cursor: Option<String>,
    /// At most this many; 50 by default, 500 at most.
    pub(crate) limit: Option<usize>,
}

/// How many rows a page may have, as somebody asked.
pub(crate) fn limit(asked: Option<usize>, default: usize, max: usize) -> Result<usize, ApiError> {
    let limit = asked.unwrap_or(default);
    if (1..=max).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::invalid(format!("`limit` must be from 1 to {max}")))
}

/// Reads rows until there are no more, or enough: `read` gives up to so many after an id, `measure` tells the id of a row and its
/// bytes. Returns the rows, and the id of the last one if there may be more.
pub(crate) async fn fill<T, I: Copy, E, R: Future<Output = Result<Vec<T>, E>>>(
    limit: usize,
    measure: impl Fn(&T) -> (I, usize),
    read: impl Fn(Option<I>, usize) -> R,
) -> Result<(Vec<T>, Option<I>), E> {
    let (mut rows, mut bytes, mut last): (Vec<T>, usize, Option<I>) = (Vec::new(), 0, None);
    let mut count = READ_FIRST.min(limit);
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
        // As many as will fit if the rest is like these.
        let fit = (PAGE_BYTES_MAX - bytes) / (bytes / rows.len()).max(1) + 1;
        count = fit.min(limit - rows.len());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Rows 1 to `there`, each of so many bytes; returns the page, whether it is full, and what was read at once.
    async fn page(there: usize, bytes: usize, limit: usize) -> (Vec<usize>, bool, Vec<usize>) {
        let reads = RefCell::new(Vec::new());
        let read = |last: Option<usize>, count: usize| {
            reads.borrow_mut().push(count);
            let from = last.unwrap_or(0) + 1;
            std::future::ready(Ok::<_, ()>((from..=there).take(count).collect()))
        };
        let (rows, next) = fill(limit, |row| (*row, bytes), read).await.unwrap();
        assert!(next.is_none() || next.as_ref() == rows.last());
        (rows, next.is_some(), reads.into_inner())
    }

    #[tokio::test]
    async fn a_page_ends_with_the_rows_with_the_limit_or_with_the_bytes() {
        let (rows, is_full, reads) = page(20, 100, 500).await;
        assert_eq!((rows, is_full, reads.len()), ((1..=20).collect(), false, 2));
        let (rows, is_full, _) = page(600, 100, 500).await;
        assert_eq!((rows, is_full), ((1..=500).collect(), true));
        let (rows, is_full, _) = page(500, 100, 500).await;
        assert_eq!((rows.len(), is_full), (500, true), "nobody knows that it is the last one");
        assert!(!page(0, 100, 500).await.1);

        let megabyte = 1024 * 1024;
        let (rows, is_full, reads) = page(600, megabyte, 500).await;
        assert_eq!((rows.len(), is_full), (PAGE_BYTES_MAX / megabyte, true));
        assert!(reads.iter().all(|count| *count <= 8), "{reads:?}");
        let (rows, is_full, _) = page(600, 100 * megabyte, 500).await;
        assert_eq!((rows, is_full), (vec![1], true), "one that is larger than a page comes alone");
    }

    #[tokio::test]
    async fn what_is_read_at_once_follows_what_was_read_before() {
        let (_, _, reads) = page(10_000, 64 * 1024, 500).await;
        let most = PAGE_BYTES_MAX / (64 * 1024) + 1;
        assert!(reads.iter().all(|count| *count <= most) && reads.len() <= 3, "{reads:?}");
    }
}
