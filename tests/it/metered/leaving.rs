//! A push whose client left is still counted by what the cell did.

use super::{Books, Told, push_of, usage, world};
use crate::support::World;
use std::{sync::Arc, time::Duration};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    sync::{Notify, Semaphore},
    time::timeout,
};

const LIMIT: Duration = Duration::from_secs(20);

/// A cell that has the request, and answers when it is told to.
struct Scene {
    world: World,
    _cell: Books,
    arrived: Arc<Semaphore>,
    answer: Arc<Notify>,
    answered: Arc<Semaphore>,
}

impl Scene {
    /// Each push stores two messages; the answer is as long as asked for.
    async fn new(length: usize) -> Self {
        let (arrived, answered) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let answer: Arc<Notify> = Arc::default();
        let (at_cell, sent, gate) = (Arc::clone(&arrived), Arc::clone(&answered), Arc::clone(&answer));
        let builder = World::builder().env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 3_000);
        let (world, cell) = world(builder, move |_| {
            at_cell.add_permits(1);
            let text = "x".repeat(length);
            let body = format!(r#"[{{"status":"queued","x":"{text}"}},{{"status":"queued"}}]"#);
            Told::After(Arc::clone(&gate), Arc::clone(&sent), Box::new(Told::answer(201, body)))
        })
        .await;
        Self { world, _cell: cell, arrived, answer, answered }
    }

    /// A client whose push is at the cell.
    async fn pushing(&self) -> TcpStream {
        let acme = self.world.tenant("acme").await;
        let body = push_of(2);
        let mut client = TcpStream::connect(("127.0.0.1", self.world.port())).await.unwrap();
        let head = format!("POST /api/v1/push HTTP/1.1\r\n{}Content-Length: {}", acme.headers(), body.len());
        client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
        timeout(LIMIT, self.arrived.acquire()).await.expect("the cell has it").unwrap().forget();
        client
    }

    /// Lets the cell answer; requests and messages that are counted in the end.
    async fn counted(mut self) -> Vec<[u64; 2]> {
        self.answer.notify_one();
        timeout(LIMIT, self.answered.acquire()).await.expect("the cell answered").unwrap().forget();
        self.world.stop_proxy(0);
        usage(&self.world).await.into_values().map(|row| [row[0], row[1]]).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_closed_is_counted_by_what_the_cell_did() {
    let scene = Scene::new(10).await;
    drop(scene.pushing().await);
    assert_eq!(scene.counted().await, [[1, 2]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_does_not_read_its_answer_is_counted() {
    let scene = Scene::new(10).await;
    let client = scene.pushing().await;
    assert_eq!(scene.counted().await, [[1, 2]]);
    drop(client);
}

/// Needs the connection layer.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_reset_its_connection_is_counted_by_what_the_cell_did() {
    let scene = Scene::new(10).await;
    let client = scene.pushing().await;
    client.set_zero_linger().unwrap();
    drop(client);
    assert_eq!(scene.counted().await, [[1, 2]]);
}

/// Needs the connection layer.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_stopped_reading_a_long_answer_is_counted() {
    // More than all sockets on the way hold.
    let scene = Scene::new(32 << 20).await;
    let client = scene.pushing().await;
    assert_eq!(scene.counted().await, [[1, 2]]);
    drop(client);
}
