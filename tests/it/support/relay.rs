//! A relay in front of a server, to lose answers or connections at a moment of the test's choosing.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};

/// What gets through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// Everything.
    Open,
    /// What clients send; answers are held back.
    Mute,
    /// Nothing: connections end, and new ones end at once.
    Cut,
}

/// See the module.
pub struct Relay {
    /// Where it listens on 127.0.0.1.
    pub port: u16,
    passage: watch::Sender<Passage>,
}

impl Relay {
    /// Starts one in front of a port on this machine.
    pub async fn start(target: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (passage, watching) = watch::channel(Passage::Open);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *watching.borrow() == Passage::Cut {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(pump(from_client, to_server, watching.clone(), false));
                tokio::spawn(pump(from_server, to_client, watching.clone(), true));
            }
        });
        Self { port, passage }
    }

    /// Changes what gets through, also on connections that are open.
    pub fn set(&self, passage: Passage) {
        self.passage.send_replace(passage);
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut passage: watch::Receiver<Passage>,
    answers: bool,
) {
    let mut piece = [0; 16 * 1024];
    loop {
        let mut cut = passage.clone();
        let read = tokio::select! {
            () = until(&mut cut, |passage| passage == Passage::Cut) => return,
            read = from.read(&mut piece) => read,
        };
        let Ok(count @ 1..) = read else { return };
        if answers {
            until(&mut passage, |passage| passage != Passage::Mute).await;
        }
        if *passage.borrow() == Passage::Cut || to.write_all(&piece[..count]).await.is_err() {
            return;
        }
    }
}

async fn until(passage: &mut watch::Receiver<Passage>, wanted: impl Fn(Passage) -> bool) {
    // When the relay is dropped, its connections go too.
    let _ = passage.wait_for(|passage| wanted(*passage)).await;
}
