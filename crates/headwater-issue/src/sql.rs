//! Statements that PostgreSQL and SQLite both execute, written once in the dialect of PostgreSQL.
//!
//! Upstream: the administrative queries of this crate, and applications with tables in the same database. Downstream:
//! sqlx. A statement may contain parameters (`$1`), casts (`::type`), row locks (` FOR UPDATE`) and these functions:
//! `headwater_ms(time)`, the milliseconds of a time; `headwater_time(ms)`, its inverse; `headwater_now()`, the time of the
//! database; `headwater_each(json)`, a table with the items of a JSON array in its column `value`, as text. SQLite has times in milliseconds, no types that need
//! casts, and locks for the whole file, so its text is the same without them.

use sqlx::{AssertSqlSafe, Error, Row};

use crate::transaction::StoreConnection;

/// A parameter of a statement. `None` is NULL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqlValue<'a> {
    /// A number, or a time in milliseconds.
    Integer(Option<i64>),
    /// A truth value.
    Boolean(Option<bool>),
    /// A text.
    Text(Option<&'a str>),
}

macro_rules! sql_value {
    ($($variant:ident($value:ty),)*) => {$(
        impl<'a> From<$value> for SqlValue<'a> {
            fn from(value: $value) -> Self {
                Self::$variant(Some(value))
            }
        }

        impl<'a> From<Option<$value>> for SqlValue<'a> {
            fn from(value: Option<$value>) -> Self {
                Self::$variant(value)
            }
        }
    )*};
}
sql_value! { Integer(i64), Boolean(bool), Text(&'a str), }

impl<'a> From<&'a String> for SqlValue<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(Some(text))
    }
}

/// A row that a statement returned.
#[derive(Debug)]
pub enum SqlRow {
    /// A row of PostgreSQL.
    #[cfg(feature = "postgres")]
    Postgres(sqlx::postgres::PgRow),
    /// A row of SQLite.
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::sqlite::SqliteRow),
}

impl SqlRow {
    /// The value of the column at this index, from 0. Fails if it has another type.
    pub fn get<T: SqlColumn>(&self, index: usize) -> Result<T, Error> {
        T::read(self, index)
    }
}

/// A type that can be read from a column of both databases.
pub trait SqlColumn: Sized {
    /// Reads the column at this index.
    fn read(row: &SqlRow, index: usize) -> Result<Self, Error>;
}

macro_rules! sql_column {
    ($($column:ty),*) => {$(
        impl SqlColumn for $column {
            fn read(row: &SqlRow, index: usize) -> Result<Self, Error> {
                match row {
                    #[cfg(feature = "postgres")]
                    SqlRow::Postgres(row) => row.try_get(index),
                    #[cfg(feature = "sqlite")]
                    SqlRow::Sqlite(row) => row.try_get(index),
                }
            }
        }
    )*};
}
sql_column!(i64, bool, String, Vec<u8>, Option<i64>, Option<bool>, Option<String>);

macro_rules! bind_all {
    ($query:expr, $parameters:expr) => {
        $parameters.iter().fold($query, |query, parameter| match parameter {
            SqlValue::Integer(value) => query.bind(*value),
            SqlValue::Boolean(value) => query.bind(*value),
            SqlValue::Text(value) => query.bind(*value),
        })
    };
}

impl StoreConnection<'_> {
    /// Executes a statement and returns its rows. Not cancel-safe: a dropped call leaves the connection unusable.
    pub async fn fetch_all(
        self,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<Vec<SqlRow>, Error> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(connection) => {
                let rows = bind_all!(sqlx::query(sql), parameters).fetch_all(connection).await?;
                Ok(rows.into_iter().map(SqlRow::Postgres).collect())
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite(connection) => sqlite_rows(connection, sql, parameters).await,
            Self::Other(_) => Err(unsupported()),
        }
    }

    /// Like [`fetch_all`](Self::fetch_all), for the first row.
    pub async fn fetch_optional(
        self,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<Option<SqlRow>, Error> {
        Ok(self.fetch_all(sql, parameters).await?.into_iter().next())
    }

    /// Executes a statement and returns the number of changed rows. Not cancel-safe, like
    /// [`fetch_all`](Self::fetch_all).
    pub async fn execute(
        self,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<u64, Error> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(connection) => {
                let done = bind_all!(sqlx::query(sql), parameters).execute(connection).await?;
                Ok(done.rows_affected())
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite(connection) => {
                let query = sqlx::query(AssertSqlSafe(sqlite_text(sql)));
                Ok(bind_all!(query, parameters).execute(connection).await?.rows_affected())
            }
            Self::Other(_) => Err(unsupported()),
        }
    }
}

fn unsupported() -> Error {
    Error::Configuration("these statements need SQLite or PostgreSQL".into())
}

/// Executes a statement on SQLite.
#[cfg(feature = "sqlite")]
pub(crate) async fn sqlite_rows(
    connection: &mut sqlx::SqliteConnection,
    sql: &str,
    parameters: &[SqlValue<'_>],
) -> Result<Vec<SqlRow>, Error> {
    let query = sqlx::query(AssertSqlSafe(sqlite_text(sql)));
    let rows = bind_all!(query, parameters).fetch_all(connection).await?;
    Ok(rows.into_iter().map(SqlRow::Sqlite).collect())
}

/// The text of a statement for SQLite.
#[cfg(feature = "sqlite")]
fn sqlite_text(sql: &str) -> String {
    let replaced = [
        ("headwater_now()", "CAST(unixepoch('subsec') * 1000 AS INTEGER)"),
        ("headwater_ms", ""),
        ("headwater_time", ""),
        ("headwater_each", "json_each"),
        (" FOR UPDATE", ""),
    ];
    let sql = replaced.iter().fold(sql.to_owned(), |sql, (from, to)| sql.replace(from, to));
    let is_type = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut parts = sql.split("::");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start_matches(is_type))
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn the_text_for_sqlite_has_no_casts_locks_and_functions() {
        let postgres = "SELECT id::text, headwater_ms(at) FROM t WHERE id = $1::text::uuid
            AND at > headwater_time($2) AND at < headwater_now() AND n IN (SELECT value::bigint FROM headwater_each($3)) FOR UPDATE";
        let sqlite = "SELECT id, (at) FROM t WHERE id = $1
            AND at > ($2) AND at < CAST(unixepoch('subsec') * 1000 AS INTEGER) AND n IN (SELECT value FROM json_each($3))";
        assert_eq!(sqlite_text(postgres), sqlite);
    }
}
