//! Calls that wait together and share a commit: each keeps its own verdict, whatever becomes of its neighbours.

use super::{ACME, GLOBEX, SOON, cell_sql, number, refusal, refused, sample, scrape};
use crate::support::{Answer, Passage, Socket, World, eventually};
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

/// As long as `held` names its key, a write does not get on; and the key `poison` cannot be written at all.
const HOLD: &str = "
    CREATE TABLE public.held (key text);
    INSERT INTO public.held VALUES ('hold'), ('hold2');
    CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.key = 'poison' THEN
            RAISE EXCEPTION 'not this one';
        END IF;
        WHILE EXISTS (SELECT FROM public.held WHERE key = NEW.key) LOOP
            PERFORM pg_catalog.pg_sleep(0.002);
        END LOOP;
        RETURN NEW;
    END $$;
    CREATE TRIGGER hold BEFORE INSERT ON queen.kv FOR EACH ROW EXECUTE FUNCTION public.hold()";

/// Groups that are held.
const HELD: &str = "SELECT count(*) FROM pg_stat_activity
                     WHERE wait_event = 'PgSleep' AND datname = current_database()";

/// A lane that is taken, and the calls that wait for it in the order they came.
struct Crowd {
    world: World,
    first: Socket,
    waiting: Vec<Socket>,
}

impl Crowd {
    /// Takes the lane of conditional writes: of eight connections there is one lane for each sort.
    async fn gather(world: World) -> Self {
        cell_sql(&world, HOLD).await;
        let first = send(&world, ACME, &claim("hold")).await;
        eventually("the lane is taken", SOON, async || (number(&world, HELD).await == 1).then_some(())).await;
        Self { world, first, waiting: Vec::new() }
    }

    /// Lets calls wait for the lane, in any order: all at once, because they wait for five seconds at most.
    async fn join(&mut self, calls: &[(Uuid, Value)]) {
        for (tenant, operation) in calls {
            self.waiting.push(send(&self.world, *tenant, operation).await);
        }
        let expected = f64::from(u32::try_from(calls.len()).unwrap());
        eventually("the calls wait", SOON, async || {
            let metrics = scrape(&self.world, self.world.cell_port).await;
            let waiting = sample(&metrics, r#"queen_kv_pool{state="waiting"}"#);
            ((waiting - expected).abs() < f64::EPSILON).then_some(())
        })
        .await;
    }

    async fn release(&mut self, key: &str) {
        cell_sql(&self.world, &format!("DELETE FROM public.held WHERE key = '{key}'")).await;
    }

    async fn answers(&mut self) -> Vec<Answer> {
        let mut answers = Vec::new();
        for socket in &mut self.waiting {
            answers.push(socket.answer().await.unwrap());
        }
        answers
    }
}

async fn send(world: &World, tenant: Uuid, operation: &Value) -> Socket {
    let mut socket = Socket::open(world.cell_port).await;
    let body = json!([operation]).to_string();
    let head = world.cell_head("POST /api/v1/kv", tenant);
    assert!(socket.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).await);
    socket
}

fn op(name: &str, key: &str, more: &Value) -> Value {
    let mut operation = json!({"op": name, "ns": "ns", "key": key, "forever": true, "value": 1, "delta": 1});
    operation.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    operation
}

fn claim(key: &str) -> Value {
    op("putIfAbsent", key, &json!({}))
}

fn shown(answer: &Answer) -> Value {
    let result = &answer.json()["results"][0];
    json!([result["applied"], result["reason"], result["value"]])
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_of_a_group_has_the_verdict_it_would_have_alone() {
    let world = World::builder().proxies(0).start().await;
    for key in ["old1", "old2", "old3"] {
        assert_eq!(send(&world, ACME, &claim(key)).await.answer().await.unwrap().status, 200);
    }
    let mut crowd = Crowd::gather(world).await;
    let calls = [
        (ACME, claim("z")),
        (ACME, op("putIfAbsent", "old1", &json!({"required": true}))),
        (GLOBEX, claim("old1")),
        (ACME, op("put", "old2", &json!({"expect": 1_000_000}))),
        (ACME, op("incr", "c", &json!({}))),
        (ACME, op("incr", "c", &json!({"delta": 2}))),
        (ACME, op("incr", "c", &json!({"delta": "one"}))),
        (ACME, op("putIfAbsent", "n", &json!({"value": "\u{0}"}))),
        (ACME, op("delete", "old3", &json!({}))),
        (ACME, op("delete", "old3", &json!({}))),
    ];
    crowd.join(&calls).await;
    crowd.release("hold").await;
    let answers = crowd.answers().await;
    assert_eq!(crowd.first.answer().await.unwrap().status, 200);
    let verdict = answers[1].json();
    assert_eq!((&verdict["ok"], &verdict["kvReason"]), (&json!(false), &json!("exists")));
    assert_eq!(refusal(&answers[6]), refused(400, "kv_bad_request", "kv_bad_request"));
    assert_eq!(answers[6].json()["detail"], "operation 0: delta must be a number");
    assert_eq!(refusal(&answers[7]), refused(400, "kv_bad_request", "kv_bad_body"));
    for (at, expected) in
        [(0, json!([true, null, 1])), (2, json!([true, null, 1])), (3, json!([false, "version", 1]))]
    {
        assert_eq!(shown(&answers[at]), expected, "call {at}");
    }
    // Of two for one key, either may have come first.
    let pair = |first: usize| (shown(&answers[first]), shown(&answers[first + 1]));
    let counted = pair(4);
    let (one, two, three) = (json!([true, null, 1]), json!([true, null, 2]), json!([true, null, 3]));
    assert!(counted == (one.clone(), three.clone()) || counted == (three, two), "{counted:?}");
    let (deleted, absent) = (pair(8), json!([false, "absent", null]));
    assert!(deleted == (one.clone(), absent.clone()) || deleted == (absent, one), "{deleted:?}");
    let transactions = "SELECT count(DISTINCT xmin::text) FROM queen.kv
                         WHERE key IN ('z', 'c') OR tenant_id = '00000000-0000-0000-0000-00000009105e'";
    assert_eq!(number(&crowd.world, transactions).await, 1, "one commit for all");
    assert_eq!(
        number(&crowd.world, "SELECT count(*) FROM queen.kv").await,
        6,
        "hold, z, c, two old, GLOBEX's"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_breaks_its_group_falls_alone() {
    let mut crowd = Crowd::gather(World::builder().proxies(0).start().await).await;
    crowd.join(&["a", "poison", "z"].map(|key| (ACME, claim(key)))).await;
    crowd.release("hold").await;
    let answers = crowd.answers().await;
    assert_eq!(refusal(&answers[1]), refused(500, "kv_error", "sqlstate_P0001"));
    for at in [0, 2] {
        assert_eq!(shown(&answers[at]), json!([true, null, 1]));
    }
    assert_eq!(number(&crowd.world, "SELECT count(*) FROM queen.kv").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_held_elsewhere_stops_only_the_call_that_wants_it() {
    let world = World::builder().proxies(0).start().await;
    assert_eq!(send(&world, ACME, &claim("k")).await.answer().await.unwrap().status, 200);
    let mut crowd = Crowd::gather(world).await;
    let mut keeper: PgConnection = crowd.world.cell_database().await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM queen.kv FOR UPDATE").execute(&mut keeper).await.unwrap();
    let calls = [op("incr", "k", &json!({})), claim("a"), claim("z")];
    crowd.join(&calls.map(|call| (ACME, call))).await;
    crowd.release("hold").await;
    for at in [1, 2] {
        assert_eq!(shown(&crowd.waiting[at].answer().await.unwrap()), json!([true, null, 1]));
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut keeper).await.unwrap();
    assert_eq!(shown(&crowd.waiting[0].answer().await.unwrap()), json!([true, null, 2]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_answer_is_lost_leaves_the_outcome_of_each_call_open() {
    let mut crowd = Crowd::gather(World::builder().proxies(0).cell_behind_relay().start().await).await;
    crowd.join(&["a", "hold2", "z"].map(|key| (ACME, claim(key)))).await;
    crowd.release("hold").await;
    assert_eq!(crowd.first.answer().await.unwrap().status, 200);
    eventually("the group is held", SOON, async || (number(&crowd.world, HELD).await == 1).then_some(()))
        .await;
    crowd.world.cell_relay.as_ref().unwrap().set(Passage::Cut);
    for answer in crowd.answers().await {
        assert_eq!(refusal(&answer), refused(409, "kv_outcome_unknown", "kv_outcome_unknown"));
    }
    crowd.release("hold2").await;
    eventually("the server is done", SOON, async || (number(&crowd.world, HELD).await == 0).then_some(()))
        .await;
    let stored = number(&crowd.world, "SELECT count(*) FROM queen.kv WHERE key <> 'hold'").await;
    assert!(stored == 0 || stored == 3, "all or none, not {stored}");
}
