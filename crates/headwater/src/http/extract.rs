//! Arguments of routes from the path and the query, refused in the shape of every refusal.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::http::{ApiError, NOTHING_HERE};

/// What stands in the path. What does not fit leads nowhere: 404.
pub(crate) struct PathOf<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let found = Path::<T>::from_request_parts(parts, state).await;
        let Path(found) = found.map_err(|_| ApiError::not_found(NOTHING_HERE))?;
        Ok(Self(found))
    }
}

/// What stands in the query. Let `T` refuse unknown fields, so that a slip of the pen is told.
pub(crate) struct QueryOf<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let found = Query::<T>::try_from_uri(&parts.uri);
        let Query(found) = found.map_err(|error| {
            let problem = std::error::Error::source(&error).map(ToString::to_string);
            let problem = problem.unwrap_or_else(|| error.to_string());
            ApiError::invalid(format!("the query is wrong: {problem}"))
        })?;
        Ok(Self(found))
    }
}
