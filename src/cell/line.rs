//! A connection of a background task: made when needed, given up when anything is odd.

use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, Postgres};
use sqlx::query::QueryScalar;
use tokio::time::timeout;

/// See the module. It belongs to one task, so neither requests nor other tasks wait for it.
#[derive(Debug)]
pub(super) struct Line {
    options: PgConnectOptions,
    connection: Option<PgConnection>,
    limit: Duration,
}

/// Why a question was not answered. The texts quote nothing that the server said.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    #[error("the database refused: SQLSTATE {0}")]
    Refused(String),
    #[error("the database did not answer within {0:?}")]
    Late(Duration),
    #[error("the database is out of reach")]
    Lost,
    #[error("the database answered something else than was asked for")]
    Unreadable,
}

impl LineError {
    /// Whether objects or privileges are missing, which no repetition mends.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(self, Self::Refused(sqlstate) if sqlstate.starts_with("42"))
    }
}

impl Line {
    /// A line over which no question may take longer than `limit`; the server is told the same.
    pub(super) fn new(options: PgConnectOptions, limit: Duration) -> Self {
        let options = options.options([("statement_timeout", limit.as_millis().to_string())]);
        Self { options, connection: None, limit }
    }

    /// Asks for one text.
    pub(super) async fn ask(
        &mut self,
        query: QueryScalar<'_, Postgres, String, PgArguments>,
    ) -> Result<String, LineError> {
        // A connection that is lost in the middle, or stays silent, is not used again.
        let connection = self.connection.take();
        let exchange = async {
            let mut connection = match connection {
                Some(connection) => connection,
                None => self.options.connect().await?,
            };
            let answer = query.fetch_one(&mut connection).await;
            Ok::<_, sqlx::Error>((connection, answer))
        };
        // The server's own limit goes first, and its answer tells more.
        let (connection, answer) = timeout(self.limit + Duration::from_secs(1), exchange)
            .await
            .map_err(|_| LineError::Late(self.limit))?
            .map_err(|error| LineError::from(&error))?;
        match answer {
            Ok(text) => {
                self.connection = Some(connection);
                Ok(text)
            }
            Err(error) => {
                let error = LineError::from(&error);
                // A read-only session stays so after the database has changed its mind; a new one does not.
                if error.is_permanent() {
                    self.connection = Some(connection);
                }
                Err(error)
            }
        }
    }
}

impl From<&sqlx::Error> for LineError {
    fn from(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(error) => {
                Self::Refused(error.code().map_or_else(|| "unknown".to_owned(), std::borrow::Cow::into_owned))
            }
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::RowNotFound => Self::Unreadable,
            _ => Self::Lost,
        }
    }
}
