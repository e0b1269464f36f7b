//! The one connection of a command, and how tenants, clusters, cells and people are named on it.

use super::failure::Failure;
use crate::{config::proxy::PxdbConfig, control::store::connect_options};
use serde::de::DeserializeOwned;
use sqlx::{
    Connection, FromRow, PgConnection, Postgres,
    postgres::{PgArguments, PgRow},
    query::{Query, QueryAs},
    types::Json,
};
use std::{convert::Infallible, str::FromStr, time::Duration};
use tokio::time::timeout;
use uuid::Uuid;

/// Deleting a tenant with years of usage takes longer than a proxy would wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// How an operator names a thing: by its slug (a person by the email) or by its id.
#[derive(Clone, Debug)]
pub(super) struct Reference {
    id: Option<Uuid>,
    name: Option<String>,
}

impl FromStr for Reference {
    type Err = Infallible;

    /// Only the form in which ids are printed is an id: 32 hexadecimal digits without hyphens are a
    /// valid slug.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let text = text.trim();
        let id = if text.len() == 36 { Uuid::parse_str(text).ok() } else { None };
        let name = id.is_none().then(|| text.to_owned());
        Ok(Self { id, name })
    }
}

impl From<Uuid> for Reference {
    fn from(id: Uuid) -> Self {
        Self { id: Some(id), name: None }
    }
}

impl Reference {
    /// The id, when it was named by that.
    pub(super) fn id(&self) -> Option<Uuid> {
        self.id
    }
}

/// What a reference led to.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// The row's id.
    pub id: Uuid,
    /// Its slug, or a person's email.
    pub name: String,
}

/// The control plane, as one command uses it.
pub(super) struct Plane {
    config: PxdbConfig,
    connection: Option<PgConnection>,
    limit: Duration,
}

impl Plane {
    /// Connects when something is asked for the first time: what is wrong with the arguments alone is
    /// then said also where the database is away.
    pub(super) fn new(pxdb: &PxdbConfig) -> Self {
        let limit = pxdb.timeout.max(PATIENCE);
        Self { config: pxdb.clone(), connection: None, limit }
    }

    /// Says goodbye, so that the server has nothing to complain about in its log.
    pub(super) async fn close(self) {
        if let Some(connection) = self.connection {
            let _ = timeout(Duration::from_secs(1), connection.close()).await;
        }
    }

    /// Runs a statement whose result nobody needs.
    pub(super) async fn run(&mut self, query: Query<'_, Postgres, PgArguments>) -> Result<(), Failure> {
        self.within(async |connection| query.execute(connection).await).await?;
        Ok(())
    }

    /// The first row of a statement. All of its answer is read: what is reported as done is committed.
    pub(super) async fn find<T>(
        &mut self,
        query: QueryAs<'_, Postgres, T, PgArguments>,
    ) -> Result<Option<T>, Failure>
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        Ok(self.all(query).await?.into_iter().next())
    }

    /// Every row of a statement.
    pub(super) async fn all<T>(
        &mut self,
        query: QueryAs<'_, Postgres, T, PgArguments>,
    ) -> Result<Vec<T>, Failure>
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        self.within(async |connection| query.fetch_all(connection).await).await
    }

    /// The next statement gets a connection of its own: this one did not answer.
    pub(super) fn reconnect(&mut self) {
        self.connection = None;
    }

    /// The one value of a statement that always has a row.
    pub(super) async fn value<T>(
        &mut self,
        query: QueryAs<'_, Postgres, (T,), PgArguments>,
    ) -> Result<T, Failure>
    where
        (T,): for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        let (value,) = self.find(query).await?.ok_or_else(|| Failure::of(sqlx::Error::RowNotFound))?;
        Ok(value)
    }

    /// The one document of a statement that always has a row.
    pub(super) async fn document<T>(
        &mut self,
        query: QueryAs<'_, Postgres, (Json<T>,), PgArguments>,
    ) -> Result<T, Failure>
    where
        T: DeserializeOwned + Send + Unpin + 'static,
    {
        self.value(query).await.map(|Json(document)| document)
    }

    /// The tenant of this slug or id.
    pub(super) async fn tenant(&mut self, reference: &Reference) -> Result<Named, Failure> {
        let sql = "SELECT id, slug FROM queen_proxy.tenants WHERE id = $1 OR slug = lower($2 COLLATE \"C\")";
        self.named(sql, reference, "tenant").await
    }

    /// The cluster of this slug or id.
    pub(super) async fn cluster(&mut self, reference: &Reference) -> Result<Named, Failure> {
        let sql = "SELECT id, slug FROM queen_proxy.clusters WHERE id = $1 OR slug = lower($2 COLLATE \"C\")";
        self.named(sql, reference, "cluster").await
    }

    /// The cell of this slug or id. Slugs of cells are stored as they were given.
    pub(super) async fn cell(&mut self, reference: &Reference) -> Result<Named, Failure> {
        let sql = "SELECT id, slug FROM queen_proxy.cells WHERE id = $1 OR slug = $2";
        self.named(sql, reference, "cell").await
    }

    /// The person of this email or id.
    pub(super) async fn user(&mut self, reference: &Reference) -> Result<Named, Failure> {
        let sql = "SELECT id, email FROM queen_proxy.users WHERE id = $1 OR email = lower($2)";
        self.named(sql, reference, "user").await
    }

    async fn named(
        &mut self,
        sql: &'static str,
        reference: &Reference,
        what: &'static str,
    ) -> Result<Named, Failure> {
        let query = sqlx::query_as::<_, (Uuid, String)>(sql).bind(reference.id).bind(&reference.name);
        let (id, name) = self.find(query).await?.ok_or(Failure::Missing(what))?;
        Ok(Named { id, name })
    }

    async fn within<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, Failure> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(connect(&self.config, self.limit).await?),
        };
        match timeout(self.limit, work(connection)).await {
            Ok(answer) => answer.map_err(Failure::of),
            Err(_) => Err(Failure::silent(self.limit)),
        }
    }
}

async fn connect(pxdb: &PxdbConfig, statements: Duration) -> Result<PgConnection, Failure> {
    let patient = PxdbConfig { timeout: statements, ..pxdb.clone() };
    let options = connect_options(&patient, "queen-proxy-admin");
    match timeout(pxdb.timeout, PgConnection::connect_with(&options)).await {
        Ok(connected) => connected.map_err(Failure::connecting),
        Err(_) => Err(Failure::not_connected(pxdb.timeout)),
    }
}

#[cfg(test)]
mod tests {
    use super::Reference;

    #[test]
    fn only_a_hyphenated_uuid_is_an_id() {
        let id = "0198c0de-0000-7000-8000-000000000001";
        let cases = [
            (id, true),
            (&id.to_uppercase(), true),
            (&id.replace('-', ""), false),
            ("acme", false),
            ("", false),
            ("ops@acme.example", false),
            ("0198c0de-0000-7000-8000-00000000000g", false),
        ];
        for (text, is_id) in cases {
            let reference: Reference = text.parse().unwrap();
            assert_eq!((reference.id.is_some(), reference.name.is_none()), (is_id, is_id), "{text}");
        }
    }
}
