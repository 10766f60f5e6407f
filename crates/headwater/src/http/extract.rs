//! Extractors for path and query parameters that fail with an [`ApiError`].

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::http::{ApiError, NOT_FOUND_MESSAGE};

/// Path parameters. Values that do not parse give 404.
pub(crate) struct PathParams<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let found = Path::<T>::from_request_parts(parts, state).await;
        let Path(found) = found.map_err(|_| ApiError::not_found(NOT_FOUND_MESSAGE))?;
        Ok(Self(found))
    }
}

/// Query parameters. `T` should deny unknown fields, so that typos are reported.
pub(crate) struct QueryParams<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let found = Query::<T>::try_from_uri(&parts.uri);
        let Query(found) = found.map_err(|error| {
            let problem = std::error::Error::source(&error).map(ToString::to_string);
            let problem = problem.unwrap_or_else(|| error.to_string());
            ApiError::invalid(format!("invalid query: {problem}"))
        })?;
        Ok(Self(found))
    }
}
