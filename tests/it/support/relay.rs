//! A relay in front of PostgreSQL, to hold back or cut what passes at a moment of the test's choosing, as a
//! network does.

use std::sync::{Arc, Mutex};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

/// What gets through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// Everything.
    Open,
    /// What clients send; answers are held back.
    Mute,
    /// Nothing, and nothing is closed.
    Silent,
    /// Nothing: connections end, and new ones end at once.
    Cut,
}

/// See the module.
pub struct Relay {
    /// Where it listens on 127.0.0.1.
    pub port: u16,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

struct State {
    /// Of new connections.
    passage: Passage,
    ways: Vec<Way>,
}

/// One connection.
struct Way {
    is_listener: bool,
    passage: watch::Sender<Passage>,
}

impl Relay {
    /// Starts one in front of a port on this machine.
    pub async fn start(target: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State { passage: Passage::Open, ways: Vec::new() }));
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, target, Arc::clone(&shared)));
            }
        });
        Self { port, state, task }
    }

    /// Changes what gets through, also on connections that are open.
    pub fn set(&self, passage: Passage) {
        let mut state = self.state.lock().unwrap();
        state.passage = passage;
        for way in &state.ways {
            way.passage.send_replace(passage);
        }
    }

    /// Nothing passes on the connections that listen for notifications now; new ones work.
    pub fn silence_listeners(&self) {
        for way in self.state.lock().unwrap().ways.iter().filter(|way| way.is_listener) {
            way.passage.send_replace(Passage::Silent);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
        self.set(Passage::Cut);
    }
}

async fn carry(mut client: TcpStream, target: u16, state: Arc<Mutex<State>>) {
    // The first message names the program.
    let mut first = vec![0; 16 * 1024];
    let Ok(size @ 1..) = client.read(&mut first).await else { return };
    first.truncate(size);
    let is_listener = String::from_utf8_lossy(&first).contains("queen-proxy-listen");
    let mut passage = {
        let mut state = state.lock().unwrap();
        let (sender, receiver) = watch::channel(state.passage);
        state.ways.push(Way { is_listener, passage: sender });
        receiver
    };
    until(&mut passage, |passage| passage != Passage::Silent).await;
    if *passage.borrow() == Passage::Cut {
        return;
    }
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    if server.write_all(&first).await.is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let asked = |passage| passage != Passage::Silent;
    let answered = |passage| !matches!(passage, Passage::Silent | Passage::Mute);
    tokio::spawn(pump(from_client, to_server, passage.clone(), asked));
    tokio::spawn(pump(from_server, to_client, passage, answered));
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut passage: watch::Receiver<Passage>,
    gets_through: impl Fn(Passage) -> bool,
) {
    let mut piece = [0; 16 * 1024];
    loop {
        let mut cut = passage.clone();
        let read = tokio::select! {
            () = until(&mut cut, |passage| passage == Passage::Cut) => return,
            read = from.read(&mut piece) => read,
        };
        let Ok(count @ 1..) = read else { return };
        until(&mut passage, &gets_through).await;
        if *passage.borrow() == Passage::Cut || to.write_all(&piece[..count]).await.is_err() {
            return;
        }
    }
}

async fn until(passage: &mut watch::Receiver<Passage>, wanted: impl Fn(Passage) -> bool) {
    let _ = passage.wait_for(|passage| wanted(*passage)).await;
}
