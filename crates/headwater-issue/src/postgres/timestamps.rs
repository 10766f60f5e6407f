//! Reads columns of the type `timestamptz` in their binary form, which costs the server no conversion.

use headwater_stream::clock::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Error, Row};

/// Milliseconds from 1970 to 2000, the epoch of PostgreSQL.
const POSTGRES_EPOCH_MS: i64 = 946_684_800_000;

/// The time in a column, in whole milliseconds like `headwater_ms`; `None` if it is NULL.
pub(super) fn time(row: &PgRow, index: usize) -> Result<Option<Timestamp>, Error> {
    // Unchecked: sqlx has no type for these columns without a library for dates. Their binary form is that of a `bigint`, in
    // microseconds since 2000.
    let microseconds: Option<i64> = row.try_get_unchecked(index)?;
    Ok(microseconds.map(from_microseconds))
}

fn from_microseconds(microseconds: i64) -> Timestamp {
    let ms = microseconds.div_euclid(1000).saturating_add(POSTGRES_EPOCH_MS);
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_down_to_milliseconds_and_never_negative() {
        let ms = |microseconds| from_microseconds(microseconds).as_millis();
        assert_eq!(ms(0), 946_684_800_000);
        assert_eq!(ms(1_999), 946_684_800_001);
        assert_eq!(ms(-1), 946_684_799_999);
        // The values of `-infinity` and `infinity`.
        assert_eq!(ms(i64::MIN), 0);
        assert!(ms(i64::MAX) > 9_000_000_000_000_000);
    }
}
